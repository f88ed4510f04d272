"""Two programs want more than half of the cluster each: they run one after the other, and neither holds a part of it."""

import threading
import time
from collections.abc import Mapping

from placement.groups import release, reserve
from placement.inventory import Gang


def test_both_finish(ray_cluster: Mapping[str, str]) -> None:
    held: list[tuple[str, float, float]] = []

    def program(name: str) -> None:
        reservation = reserve(Gang(({"CPU": 1},) * 5), run_id=name, epoch=1, timeout_s=60)  # of eight
        begin = time.monotonic()
        time.sleep(1.0)
        held.append((name, begin, time.monotonic()))
        release(reservation)

    threads = [threading.Thread(target=program, args=(f"case11-{index}",)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    (first, _, end), (second, begin, _) = sorted(held, key=lambda row: row[1])
    assert {first, second} == {"case11-0", "case11-1"}
    assert end <= begin
