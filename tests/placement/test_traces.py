"""Readers on small files with the users' columns, and the generator's marginals."""

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from placement.errors import PlacementError
from placement.profiles import load_profiles, synthetic_profiles
from placement.traces import (
    HELIOS,
    NEW_TRACE,
    PHILLY,
    TimedJob,
    as_applications,
    generate,
    generate_inventory,
    generate_philly_week,
    named_cluster,
    read_gavel,
    read_gavel_throughputs,
    read_inventory,
    read_philly,
    read_pods,
    read_sia,
    write_sia,
)

DATA = Path(os.environ.get("ZENRAY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "traces"


def needs(relative):
    path = DATA / relative
    if not path.exists():
        pytest.skip(f"{path} is missing; set ZENRAY_DATA to the folder that holds traces/")
    return path


def test_columns_are_read_by_name(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text("batch_size,time,name,num_replicas,application\n64,20,b,4,yolov3\n384,10.5,a,6,bert\n")
    jobs = read_sia(path)
    assert [(j.name, j.submit_s, j.application, j.num_replicas, j.batch_size) for j in jobs] == [
        ("a", 10.5, "bert", 6, 384),
        ("b", 20.0, "yolov3", 4, 64),
    ]
    write_sia(tmp_path / "again.csv", jobs)
    assert read_sia(tmp_path / "again.csv") == jobs
    path.write_text("name,time\na,1\n")
    with pytest.raises(PlacementError, match="application, num_replicas, batch_size"):
        read_sia(path)
    with pytest.raises(PlacementError, match="cannot read"):
        read_sia(tmp_path / "none.csv")


def test_philly_and_applications_by_gpu_hours(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-16 00:01:00,60,1,60,x\n2017-10-16 00:00:30,7200.0,8,1,x\n"
    )
    jobs = read_philly(path)
    assert [(j.submit_s, j.num_gpus, j.duration_s) for j in jobs] == [(0.0, 8, 7200.0), (30.0, 1, 60.0)]
    hours = (0.5, 5, 50, 500)
    apps = [j.application for j in as_applications([TimedJob("j", 0, 1, h * 3600) for h in hours], seed=1)]
    assert apps[0] == "cifar10"
    assert apps[1] in ("deepspeech2", "bert")
    assert apps[2:] == ["yolov3", "imagenet"]


def test_gavel(tmp_path):
    trace = tmp_path / "g.trace"
    trace.write_text("A (batch size 1)\tcmd\t-step\t1\t95121\t0.5\t2\nB (batch size 2)\tcmd\t-n\t10000\t6.0\t1\n")
    assert [(j.job_type, j.total_steps, j.submit_s, j.scale_factor) for j in read_gavel(trace)] == [
        ("A (batch size 1)", 95121, 0.5, 2),
        ("B (batch size 2)", 10000, 6.0, 1),
    ]
    trace.write_text("A\tonly\n")
    with pytest.raises(PlacementError, match=r"g\.trace:1"):
        read_gavel(trace)
    table = tmp_path / "t.json"
    table.write_text(json.dumps({"v100": {"('A (batch size 1)', 2)": {"null": 3.5, "('B', 1)": [1, 2]}}}))
    assert read_gavel_throughputs(table) == {("v100", "A (batch size 1)", 2): 3.5}
    table.write_text("[]")
    with pytest.raises(PlacementError, match="not a Gavel throughput table"):
        read_gavel_throughputs(table)


def test_alibaba_inventories_and_pods(tmp_path):
    path = tmp_path / "n.csv"
    path.write_text("gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,8,7\nH800,8,96,9\n")
    nodes = read_inventory(path, {"A10": 24, "H800": 80}.__getitem__)
    assert [(n.name, n.gpu_type, n.num_gpus, n.memory_bytes >> 30) for n in nodes] == [
        ("node-7", "A10", 1, 24),
        ("node-9", "H800", 8, 80),
    ]
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\na,1,1,0,\nb,1,1,2,P100\n")
    assert [(n.name, n.num_gpus) for n in read_inventory(path, lambda _: 16)] == [("node-b", 2)]
    path.write_text("x,y\n1,2\n")
    with pytest.raises(PlacementError, match="neither gpu_model nor model"):
        read_inventory(path, lambda _: 16)
    pods = tmp_path / "p.csv"
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time\na,1,1,1,500,P100|T4,5\n")
    assert read_pods(pods)[0].gpu_types == ("P100", "T4")
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,2,1000\n")
    assert (read_pods(pods)[0].creation_s, read_pods(pods)[0].num_gpus) == (None, 2)


@pytest.mark.parametrize(("mix", "num_jobs", "hours"), [(NEW_TRACE, 960, 48), (PHILLY, 160, 8), (HELIOS, 160, 8)])
def test_generated_traces_have_the_marginals(mix, num_jobs, hours):
    traces = [generate(mix, seed) for seed in range(30)]
    assert traces[0] == generate(mix, 0)
    assert traces[0] != traces[1]
    jobs = [job for trace in traces for job in trace]
    assert {len(trace) for trace in traces} == {num_jobs}
    assert all(0 <= job.submit_s < hours * 3600 for job in jobs)
    assert all(a.submit_s <= b.submit_s for trace in traces for a, b in pairwise(trace))
    apps = Counter(job.application for job in jobs)
    total = sum(mix.app_share.values())
    for app, share in mix.app_share.items():
        assert apps[app] / len(jobs) == pytest.approx(share / total, abs=0.02)
    assert {j.batch_size for j in jobs if j.application == "yolov3"} == {64}
    assert {(j.num_replicas, j.batch_size) for j in jobs if j.application == "deepspeech2"} == {
        (6, 320),
        (8, 320),
        (12, 640),
    }
    hourly = np.array([np.bincount([int(j.submit_s // 3600) for j in trace], minlength=hours) for trace in traces])
    assert hourly.mean() == pytest.approx(20)
    assert 30 <= np.median(hourly.max(axis=1)) <= 75, "busy hours like those of the published traces"


def test_new_trace_replicas():
    replicas = Counter(j.num_replicas for seed in range(20) for j in generate(NEW_TRACE, seed))
    total = sum(replicas.values())
    for size, share in {4: 0.09, 6: 0.24, 8: 0.24, 10: 0.06, 12: 0.25, 16: 0.12}.items():
        assert replicas[size] / total == pytest.approx(share, abs=0.03)


def test_philly_week_has_the_quantiles():
    jobs = generate_philly_week(3)
    assert len(jobs) == 14185
    sizes = Counter(j.num_gpus for j in jobs)
    assert sizes[1] / len(jobs) == pytest.approx(0.963, abs=0.01)
    duration = np.quantile([j.duration_s for j in jobs], [0.25, 0.5, 0.75, 0.9])
    assert duration == pytest.approx([593, 1236, 2390, 12376], rel=0.12)
    hourly = np.bincount([int(j.submit_s // 3600) for j in jobs], minlength=168)
    assert hourly.mean() == pytest.approx(84.4, abs=0.1)


def test_inventory_and_named_clusters():
    nodes = generate_inventory()
    assert len(nodes) == 4278
    assert sum(n.num_gpus for n in nodes) == 10412
    assert sum(n.num_gpus for n in generate_inventory(100_000)) == pytest.approx(100_000, rel=0.01)
    assert Counter(n.gpu_type for n in named_cluster("sia64")) == {"aws": 6, "rtx": 3, "dgx-ext": 2}
    with pytest.raises(PlacementError, match="sia64"):
        named_cluster("sia65")


def test_profiles_interpolate_and_limit_memory():
    app = synthetic_profiles()["deepspeech2"]
    one = app.curve("rtx", (8,))
    assert app.curve("rtx", [8, 8]).at(10)[1] > one.at(10)[1]
    middle = (one.local_batch[2] + one.local_batch[3]) / 2
    assert one.at(middle)[0] == pytest.approx((one.step_time_s[2] + one.step_time_s[3]) / 2)
    assert app.max_local_batch("rtx", (8,)) == 57, "the one limit below the largest profiled batch"
    assert app.max_local_batch("aws", (4,)) == 80
    odd = app.curve("rtx", (8, 4))
    assert np.all(np.isfinite(odd.step_time_s))
    with pytest.raises(PlacementError, match="no profile for GPU type tpu"):
        app.curve("tpu", (1,))


def test_missing_profiles_name_the_path(tmp_path):
    with pytest.raises(PlacementError, match=str(tmp_path / "profiles")):
        load_profiles(tmp_path / "profiles")


def test_published_files():
    jobs = read_sia(needs("sia/workloads/newtrace/workload-1.csv"))
    assert len(jobs) == 960
    assert len(read_philly(needs("philly/philly_busiest_week.csv"))) == 14185
    assert (
        sum(n.num_gpus for n in read_inventory(needs("alibaba/spot-gpu-v2026/node_info_df.csv"), lambda _: 80)) == 10412
    )
    assert len(read_pods(needs("alibaba/gpu-v2023/openb_pod_list_default.csv"))) == 8152
    assert len(read_gavel(needs("gavel/msr-seed0-0e4a51.trace"))) > 1000
    assert read_gavel_throughputs(needs("gavel/simulation_throughputs.json"))
    bert = load_profiles(needs("sia/profiles"), ["bert"])["bert"]
    assert bert.initial_batch == 12
    assert bert.max_batch == 384
    assert len(bert.epoch_progress) == 2
    assert bert.max_local_batch("dgx-ext", (8,)) == 48
