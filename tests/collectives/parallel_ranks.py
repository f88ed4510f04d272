"""What the rank processes of the parallelism tests run: FSDP2, tensor, pipeline and data parallelism of small models."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from collectives.codecs import CODECS
from collectives.ddp import attach
from collectives.errors import ZenrayError
from collectives.fsdp import compress_fsdp
from collectives.guards import look
from collectives.outer import OuterLoop
from collectives.pipeline import CompressedStage
from collectives.policy import SyncPolicy
from collectives.replicas import digest
from collectives.tensor_parallel import TensorParallel
from collectives.transport import Transport
from collectives.zero import ShardedOptimizer

WIDTH, TOKENS, VOCABULARY = 128, 32, 64


def policy(**roles: str) -> SyncPolicy:
    codecs = tuple((role, (codec,)) for role, codec in roles.items())
    return SyncPolicy(codecs=codecs, fixed=True, dense_steps=0)


class Block(nn.Module):
    """A feed-forward block with a mixing step over positions: enough of a transformer for the parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        return mixed + self.down(functional.gelu(self.up(self.norm(mixed))))


class Gpt(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """A learnable rule: the next token is three times the last one, plus one."""
    first = torch.randint(0, VOCABULARY, (rows,), generator=torch.Generator().manual_seed(100 * step + rank))
    ids = [first]
    for _ in range(TOKENS):
        ids.append((3 * ids[-1] + 1) % VOCABULARY)
    all_ids = torch.stack(ids, 1)
    return all_ids[:, :-1], all_ids[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference_losses(size: int, steps: int, lr: float) -> list[float]:
    """One process, all ranks' batches, exact."""
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [loss_of(model(ids), targets) for ids, targets in (batch(rank, step) for rank in range(size))]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def mean_over_ranks(loss: Tensor) -> float:
    value = loss.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return float(value)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def sharded(made: SyncPolicy | None) -> tuple[nn.Module, Any]:
    model = Gpt()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, compress_fsdp(model, made, timeout_s=30) if made is not None else None


def fsdp_losses(made: SyncPolicy | None, rank: int, steps: int) -> dict[str, Any]:
    model, sync = sharded(made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        ids, targets = batch(rank, step)
        loss = loss_of(model(ids), targets)
        loss.backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()))
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    records = {} if sync is None else {r.role: [r.raw_bytes, r.wire_bytes, r.residual_bytes] for r in sync.records()}
    whole = {name: digest(p.full_tensor()) for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "records": records, "digests": whole}


def fsdp(rank: int) -> dict[str, Any]:
    found = {"exact": reference_losses(dist.get_world_size(), 6, 0.5), "torch": fsdp_losses(None, rank, 6)}
    found["int8_grad"] = fsdp_losses(policy(fsdp_grad="int8b", fsdp_param="lossless"), rank, 6)
    found["int8_param"] = fsdp_losses(policy(fsdp_grad="bf16", fsdp_param="int8b"), rank, 6)
    feedback = SyncPolicy(codecs=(("fsdp_grad", ("int4b",)),), fixed=True, error_feedback=True)
    found["int4_feedback"] = fsdp_losses(feedback, rank, 6)
    found["zeropp"] = fsdp_losses(SyncPolicy.of("zeropp"), rank, 6)
    found["none"] = error_name(lambda: compress_fsdp(nn.Linear(2, 2)))
    return found


def fsdp_resume(rank: int) -> dict[str, Any]:
    feedback = SyncPolicy(codecs=(("fsdp_grad", ("int4b",)),), fixed=True, error_feedback=True)

    def train(model: nn.Module, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in steps:
            optimizer.zero_grad()
            ids, targets = batch(rank, step)
            loss_of(model(ids), targets).backward()
            optimizer.step()

    straight, sync = sharded(feedback)
    train(straight, range(3))
    state = pickle.loads(pickle.dumps(sync.state_dict()))
    parameters = {name: p.to_local().clone() for name, p in straight.named_parameters()}
    train(straight, range(3, 5))
    again, other = sharded(feedback)
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.to_local().copy_(parameters[name])
    other.load_state_dict(state)
    train(again, range(3, 5))
    same = all(p.to_local().equal(q.to_local()) for p, q in zip(straight.parameters(), again.parameters(), strict=True))
    return {"same": same, "modules": sorted(state)}


def error_name(body: Any) -> str:
    try:
        body()
    except ZenrayError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# --- tensor and pipeline parallelism ----------------------------------------------------------------------------------


def tensor_parallel_blocks(blocks: nn.Module, mesh: DeviceMesh, made: SyncPolicy) -> TensorParallel:
    parallel = TensorParallel(mesh, made, timeout_s=30)
    for block in blocks:
        parallelize_module(block, mesh, {"up": parallel.colwise(), "down": parallel.rowwise()})
    return parallel


def tensor_parallel(rank: int) -> dict[str, Any]:
    """Both ranks see the same batch: results must be those of one process."""
    exact = Gpt()
    ids, targets = batch(0, 0)
    loss_of(exact(ids), targets).backward()
    found: dict[str, Any] = {"exact": float(loss_of(exact(ids), targets))}
    for name, made in (("plain", SyncPolicy("off")), ("fp8b", policy(tp_act="fp8b", tp_grad="fp8b"))):
        model = Gpt()
        parallel = tensor_parallel_blocks(model.blocks, init_device_mesh("cpu", (dist.get_world_size(),)), made)
        loss = loss_of(model(ids), targets)
        loss.backward()
        up, want = model.blocks[0].up.weight.grad.full_tensor(), exact.blocks[0].up.weight.grad
        found[name] = {
            "loss": float(loss),
            "up": float((up - want).norm() / want.norm()),
            "embed": float((model.embed.weight.grad - exact.embed.weight.grad).norm() / exact.embed.weight.grad.norm()),
            "embed_digest": digest(model.embed.weight.grad),
            "records": {r.role: [r.raw_bytes, r.wire_bytes] for r in parallel.records()},
        }
    return found


class First(nn.Module):
    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.embed, self.blocks = model.embed, model.blocks[:1]

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks[0](self.embed(ids))


class Last(nn.Module):
    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.blocks, self.head = model.blocks[1:], model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


def pipeline(rank: int) -> dict[str, Any]:
    ids, targets = batch(0, 0, rows=16)
    exact = Gpt()
    parts = [loss_of(exact(i), t) for i, t in zip(ids.chunk(4), targets.chunk(4), strict=True)]
    torch.stack(parts).mean().backward()
    found: dict[str, Any] = {}
    for name, made in (("plain", SyncPolicy("off")), ("int8b", policy(pp_act="int8b", pp_grad="int8b"))):
        part = First(Gpt()) if rank == 0 else Last(Gpt())
        stage = CompressedStage(part, rank, 2, torch.device("cpu"), policy=made, timeout_s=30)
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
        losses: list[Tensor] = []
        schedule.step(ids) if rank == 0 else schedule.step(target=targets, losses=losses)
        block = part.blocks[0].up.weight.grad
        want = exact.blocks[rank].up.weight.grad
        found[name] = {
            "error": float((block - want).norm() / want.norm()),
            "losses": [float(x) for x in losses],
            "records": {r.role: [r.raw_bytes, r.wire_bytes] for r in stage.records()},
        }
    found["exact"] = [float(x) for x in parts]
    found["unsized"] = error_name(
        lambda: CompressedStage(nn.Linear(2, 2), 0, 2, torch.device("cpu"), policy={"pp_act": "eb"})
    )
    return found


class ShardedBlock(nn.Module):
    """A block's shard with plain local weights: torch's way from DTensors to DDP makes new parameters every forward."""

    def __init__(self, block: Block, parallel: TensorParallel) -> None:
        super().__init__()
        part, size = parallel.act.transport.rank, parallel.act.transport.size
        self.norm, self.parallel = block.norm, parallel
        self.up_weight = nn.Parameter(block.up.weight.detach().chunk(size)[part].clone())
        self.up_bias = nn.Parameter(block.up.bias.detach().chunk(size)[part].clone())
        self.down_weight = nn.Parameter(block.down.weight.detach().chunk(size, 1)[part].clone())
        self.down_bias = nn.Parameter(block.down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        hidden = functional.gelu(functional.linear(self.parallel.enter(self.norm(mixed)), self.up_weight, self.up_bias))
        return mixed + self.parallel.leave(functional.linear(hidden, self.down_weight)) + self.down_bias


def three_dimensions(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    """2 pipeline stages x 2 data-parallel replicas x 2 tensor-parallel shards of one tiny GPT."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage_index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    made = SyncPolicy.of(config["policy"]) if isinstance(config["policy"], str) else policy(**config["policy"])
    model = Gpt()
    part: nn.Module = First(model) if stage_index == 0 else Last(model)
    tensor = TensorParallel(mesh["tp"], made, timeout_s=60)
    part.blocks = nn.ModuleList(ShardedBlock(block, tensor) for block in part.blocks)
    ddp = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
    hook = attach(ddp, made, timeout_s=60)
    # Shapes are given: torch would find them by a backward pass that DDP's bucket counter cannot stand.
    ids, hidden = torch.zeros(4, TOKENS, dtype=torch.int64), torch.zeros(4, TOKENS, WIDTH, requires_grad=True)
    logits = torch.zeros(4, TOKENS, VOCABULARY, requires_grad=True)
    stage = CompressedStage(
        ddp,
        stage_index,
        2,
        torch.device("cpu"),
        input_args=(ids if stage_index == 0 else hidden,),
        output_args=(hidden if stage_index == 0 else logits,),
        group=mesh["pp"].get_group(),
        policy=made,
        timeout_s=60,
    )
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
    losses: list[float] = []
    for step in range(config["steps"]):
        optimizer.zero_grad()
        ids, targets = batch(replica, step)
        found: list[Tensor] = []
        schedule.step(ids) if stage_index == 0 else schedule.step(target=targets, losses=found)
        optimizer.step()
        losses += [float(torch.stack(found).mean())] if found else []
    records = [*tensor.records(), *stage.records(), hook.role_record()]
    result = {
        "losses": losses,
        "place": [stage_index, replica, mesh["tp"].get_local_rank()],
        "digests": {name: digest(p) for name, p in part.named_parameters()},
        "ratios": {r.role: r.ratio for r in records},
        "exact": reference_losses(2, config["steps"], 0.5) if transport.rank == 0 else [],
    }
    hook.close()
    return result


# --- sharded optimizer, outer loop ------------------------------------------------------------------------------------


def zero_one(rank: int) -> dict[str, Any]:
    """AdamW with its state cut over the ranks, against the same on one process."""
    size, found = dist.get_world_size(), {}
    exact = Gpt()
    exact_optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-2)
    exact_losses = []
    for step in range(5):
        exact_optimizer.zero_grad()
        loss = torch.stack([loss_of(exact(i), t) for i, t in (batch(r, step) for r in range(size))]).mean()
        loss.backward()
        exact_optimizer.step()
        exact_losses.append(float(loss))
    for name, made in (
        ("plain", SyncPolicy("off")),
        ("int8b", policy(fsdp_grad="int8b", fsdp_param="lossless")),
        ("int8b_changes", policy(fsdp_grad="bf16", fsdp_param="int8b")),
    ):
        model = Gpt()
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, made, timeout_s=30, lr=1e-2)
        losses = []
        for step in range(5):
            if step == 3:
                state = pickle.loads(pickle.dumps(optimizer.state_dict()))
                optimizer = ShardedOptimizer(model, torch.optim.AdamW, made, timeout_s=30, lr=1e-2)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            ids, targets = batch(rank, step)
            loss = loss_of(model(ids), targets)
            loss.backward()
            optimizer.step()
            losses.append(mean_over_ranks(loss))
        weights = {n: digest(p) for n, p in model.named_parameters()}
        found[name] = {"losses": losses, "digests": weights, "state_values": optimizer.num_state_values}
        found[name]["parameters"] = sum(p.numel() for p in model.parameters())
        parts = [torch.empty_like(optimizer.part) for _ in range(size)]
        dist.all_gather(parts, optimizer.part.detach())
        whole = torch.cat(parts)
        found[name]["off_by"] = float((optimizer.values - whole).norm() / whole.norm())
        found[name]["once_off_by"] = look(CODECS["int8b"], whole).relative_error
        found[name]["ratio"] = optimizer.records()[1].ratio
    return found | {"exact": exact_losses}


def outer_loop(rank: int) -> dict[str, Any]:
    """Four outer steps of five inner ones, exact and with quantised deltas."""
    found: dict[str, Any] = {}
    for codec in ("off", "int8b", "int4b"):
        model = Gpt()
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        made = SyncPolicy("off") if codec == "off" else policy(outer_delta=codec)
        outer = OuterLoop(model, made, every_steps=5, timeout_s=30)
        losses = []
        for step in range(20):
            inner.zero_grad()
            ids, targets = batch(rank, step)
            loss = loss_of(model(ids), targets)
            loss.backward()
            inner.step()
            if outer.step():
                losses.append(mean_over_ranks(loss))
                state = pickle.loads(pickle.dumps(outer.state_dict()))
                outer.load_state_dict(state)
        (record,) = outer.records()
        found[codec] = {
            "losses": losses,
            "ratio": record.ratio,
            "digests": {n: digest(p) for n, p in model.named_parameters()},
        }
    return found


def taken_back(rank: int) -> dict[str, float]:
    """Relative error of the sum of three updates by a constant gradient, the last after int4b was taken back."""
    roles = tuple((role, ("int4b",)) for role in ("fsdp_grad", "outer_delta"))
    made = SyncPolicy(codecs=roles, fixed=True, error_feedback=True)
    generator = torch.Generator().manual_seed(rank)
    x, t = (torch.randn(8, 256, generator=generator) for _ in range(2))
    exact = 3 * (t.T @ x)
    dist.all_reduce(exact, op=dist.ReduceOp.AVG)

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(256, 256, bias=False))
    sync = compress_fsdp(model, made, timeout_s=30)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), model.weight.full_tensor().clone()  # type: ignore[union-attr, operator]
    for step in range(3):
        if step == 2:
            sync.grads.take_back("once", "int4b", "a test")
        optimizer.zero_grad()
        (model(x) * t).sum().backward()
        optimizer.step()
    moved = {"fsdp_grad": before - model.weight.full_tensor()}  # type: ignore[union-attr, operator]

    plain = nn.Linear(256, 256, bias=False)
    outer = OuterLoop(plain, made, every_steps=1, lr=1.0, momentum=0.0, timeout_s=30)
    before = plain.weight.detach().clone()
    for step in range(3):
        if step == 2:
            outer.channel.take_back("all_reduce", "int4b", "a test")
        plain.weight.data -= t.T @ x
        outer.step()
    moved["outer_delta"] = before - plain.weight.detach()
    return {role: float((found - exact).norm() / exact.norm()) for role, found in moved.items()}


CASES = (fsdp, fsdp_resume, tensor_parallel, pipeline, zero_one, outer_loop, taken_back)


def run_all(transport: Transport, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for case in CASES:
        found[case.__name__] = case(transport.rank)
        dist.barrier()
    return found
