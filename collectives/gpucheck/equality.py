"""Every kernel writes the bytes of its CPU definition: small hard inputs against NumPy, large ones against numba."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from collectives.codecs import Bf16, Codec, ErrorBounded, Fp8Block, Int4Block, Int8Block, TopK
from collectives.codecs.codec import Residual
from collectives.gpucheck.report import Row
from collectives.kernels import rows, twins
from collectives.kernels.hashing import HashedOwners
from collectives.kernels.idsets import decode_bitmap, encode_bitmap, partition_by_owner
from collectives.transport import as_bytes

CODECS: dict[str, Codec] = {
    "int8b": Int8Block(),
    "int4b": Int4Block(),
    "int4b stochastic": Int4Block(stochastic=True),
    "int4b hadamard": Int4Block(hadamard=True),
    "fp8b e4m3": Fp8Block(),
    "fp8b e5m2": Fp8Block(form="e5m2"),
    "bf16": Bf16(),
    "eb": ErrorBounded(bound=0.05, relative_to="one"),
    "topk exact": TopK(method="exact"),
}
SIZES = (0, 1, 31, 33, 257, 2047, 20_001)
LARGE = 50_000_000


def hard_inputs(numel: int) -> dict[str, Tensor]:
    """Tensors on the CPU that formats stumble over."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    poisoned = normal * torch.exp(4 * torch.randn(numel, generator=torch.Generator().manual_seed(1)))
    poisoned[numel // 3 :: 3000] = torch.nan
    poisoned[numel // 2 :: 5000] = torch.inf
    return {
        "normal": normal,
        "poisoned": poisoned,
        "zeros": torch.where(normal > 1, normal, -0.0),
        "subnormal": normal * 1e-40,
        "tiny": normal * 2.0**-118,
        "huge": normal.sign() * 3.3e38,
    }


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal bytes, on whatever devices."""
    return torch.equal(*(as_bytes(t.cpu()) for t in (ours, theirs)))


def codec_faults(codec: Codec, oracle: Codec, x: Tensor, device: torch.device) -> list[str]:
    """What `codec` on `device` does differently from `oracle` on the CPU, for one input."""
    numel, faults = x.numel(), []
    there = x.to(device)

    def expect(what: str, ours: Tensor, theirs: Tensor) -> None:
        if not same(ours, theirs):
            faults.append(what)

    expected = oracle.encode(x, seed=5)
    packet = codec.encode(there, seed=5)
    expect("encode", packet, expected)
    for accumulate in (False, True):
        ours, theirs = torch.ones(numel, device=device), torch.ones(numel)
        codec.decode(packet, ours, accumulate, 0.3)
        oracle.decode(expected, theirs, accumulate, 0.3)
        expect("decode-add" if accumulate else "decode", ours, theirs)
    ours, theirs = torch.full((numel,), 0.25, device=device), torch.full((numel,), 0.25)
    expect(
        "encode with residual",
        codec.encode(there, Residual.in_place(ours), seed=3),
        oracle.encode(x, Residual.in_place(theirs), seed=3),
    )
    expect("residual", ours, theirs)
    sums = [codec.reduce_encode([packet] * 3, numel, [1.0, 0.5, 0.0], 1 / 3, seed=9)] if numel else []
    for total in sums:
        expect("reduce-encode", total, oracle.reduce_encode([expected] * 3, numel, [1.0, 0.5, 0.0], 1 / 3, seed=9))
    return faults


def check_codecs(device: torch.device, large: int = LARGE) -> Iterator[Row]:
    """One row a codec and kind of input. large: elements of the large input; 0 leaves it out."""
    for name, codec in CODECS.items():
        faults = [
            f"{fault} of {kind}, {numel} elements"
            for numel in SIZES
            for kind, x in hard_inputs(numel).items()
            for fault in codec_faults(codec, codec.twin(), x, device)
        ]
        yield _row(f"{name}, {len(SIZES)} sizes, 6 inputs", faults)
        if large:
            x = torch.randn(large, generator=torch.Generator().manual_seed(7))
            yield _row(f"{name}, {large:,} elements", codec_faults(codec, codec, x, device))


def check_rows(device: torch.device, large: int = LARGE) -> Iterator[Row]:
    """Scan, gather, scatter-add, bitmap, owners and partition."""
    generator = np.random.default_rng(3)
    for num_rows, width in ((1000, 1), (999, 36), (large // 128, 128)):
        if not num_rows:
            continue
        touched = np.flatnonzero(generator.random(num_rows) < 0.1)
        matrix = torch.zeros(num_rows, width)
        matrix[torch.from_numpy(touched), 0] = torch.from_numpy(generator.standard_normal(len(touched))).float()
        ids = rows.nonzero_rows(matrix.to(device))
        what = f"{num_rows:,} rows of {width}"
        yield _row(f"nonzero rows, {what}", [] if ids.cpu().numpy().tolist() == touched.tolist() else ["ids differ"])
        values = rows.gather_rows(matrix.to(device), ids, torch.empty(len(ids), width, device=device))
        yield _row(f"gather, {what}", [] if same(values, matrix[torch.from_numpy(touched)]) else ["rows differ"])
        if len(touched) <= 1000:
            order = torch.from_numpy(generator.permutation(len(touched)))
            total = torch.full((len(touched), width), torch.nan, device=device)
            fresh = torch.ones(len(touched), dtype=torch.uint8, device=device)
            rows.scatter_add_rows(total, torch.arange(len(touched), device=device), values, fresh)
            rows.scatter_add_rows(total, order.to(device), values, fresh)
            host = values.cpu().numpy()
            expected = twins.sum_rows(len(touched), [np.arange(len(touched)), order.numpy()], [host, host])
            yield _row(f"scatter-add, {what}", [] if same(total, torch.from_numpy(expected)) else ["sums differ"])
    for num_ids, num_positions in ((3000, 100_001), (large // 10, 20 * (large // 10))):
        if not num_ids:
            continue
        ids_host = np.unique(generator.integers(0, num_positions, num_ids))
        ids = torch.from_numpy(ids_host).to(device)
        what = f"{len(ids_host):,} of {num_positions:,}"
        back = decode_bitmap(encode_bitmap(ids, num_positions))
        yield _row(f"bitmap, {what}", [] if same(back, ids) else ["ids differ"])
        owners = HashedOwners(num_positions, 16, seed=2)
        owner_of, slots = owners.split(ids)
        back = torch.cat([owners.join(owner, slots[owner_of == owner]) for owner in range(16)])
        yield _row(f"owners, {what}", [] if same(back.sort().values, ids) else ["the inverse differs"])
        counts, order = partition_by_owner(owner_of, 16)
        expected_counts, expected_order = twins.partition_by_owner(owner_of.cpu().numpy(), 16)
        good = counts.tolist() == expected_counts.tolist() and bool((order.cpu().numpy() == expected_order).all())
        yield _row(f"partition, {what}", [] if good else ["the order differs"])


def _row(name: str, faults: list[str]) -> Row:
    note = "; ".join(faults[:4]) + (f" and {len(faults) - 4} more" if len(faults) > 4 else "")
    return Row("equality", name, "failed" if faults else "ok", note=note)
