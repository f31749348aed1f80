"""Makes the plan of a Slurm job from a request: card, nodes, time, options, batch. Loads no torch."""

from trainyard.choice import Choice
from trainyard.cluster.description import Cluster, GpuNodes, parse_minutes
from trainyard.cluster.options import choose_options
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.plan.choose_gpu import choose_gpu
from trainyard.plan.resources import Plan, ResourceRequest


def make_plan(config: TrainConfig, cluster: Cluster, request: ResourceRequest) -> Plan:
    """Choose partition, nodes, time and micro-batch size. A pure function of its arguments: does not query Slurm.

    Raises:
        UserError: the cluster has no or too few GPUs of this type, none that can hold the job, or allows less time.
    """
    if request.gpus < 1:
        raise UserError(f"GPUS={request.gpus}: a job needs at least one GPU.")
    chosen = choose_gpu(config, cluster, gpus=request.gpus, hw=request.hw, keeps_micro_batch=request.keeps_micro_batch)
    kind = cluster.gpus[chosen.hw]
    nodes = _choose_nodes(chosen.hw, kind, request)
    time = choose_time(chosen.hw, kind, cluster, request)
    return Plan(
        config=chosen.config,
        cluster=cluster,
        hw=chosen.hw,
        kind=kind,
        gpus=request.gpus,
        nodes=nodes,
        time_min=time.value,
        signal_s=min(cluster.signal_delay_s, time.value * 60 // 4),
        options=choose_options(cluster, kind, request.options, ranks_per_node=request.gpus // nodes),
        stated={name: value for name, value in request.options.items() if value},
        split=chosen.split,
        precision=chosen.precision,
        why_hw=chosen.why_hw,
        why_time=time.reason,
        why_micro_batch=chosen.why_micro_batch,
    )


def _choose_nodes(hw: str, kind: GpuNodes, request: ResourceRequest) -> int:
    nodes = request.nodes or -(-request.gpus // kind.per_node)
    if request.gpus > kind.per_node * kind.nodes or nodes > kind.nodes:
        raise UserError(
            f"{request.gpus} GPUs on {nodes} nodes requested, but {hw} has {kind.nodes} nodes of {kind.per_node}: at "
            f"most GPUS={kind.per_node * kind.nodes}."
        )
    if request.gpus % nodes or request.gpus // nodes > kind.per_node:
        fits = [n for n in range(1, kind.nodes + 1) if request.gpus % n == 0 and request.gpus // n <= kind.per_node]
        hint = f"NODES={' or '.join(map(str, fits))}" if fits else f"a multiple of {nodes} GPUs"
        raise UserError(
            f"{request.gpus} GPUs cannot be split evenly over {nodes} nodes of {kind.per_node} {hw}. Request {hint}."
        )
    return nodes


def choose_time(hw: str, kind: GpuNodes, cluster: Cluster, request: ResourceRequest) -> Choice[int]:
    known = kind.time_max and not request.options.get("partition")  # another partition has another limit
    longest = parse_minutes(kind.time_max) if known else None
    if request.time:
        requested = parse_minutes(request.time)
        if longest is not None and requested > longest:
            raise UserError(
                f"TIME={request.time}: partition {kind.partition} of {hw} allows at most {kind.time_max}. Request "
                "less: a job that reaches its limit saves, is requeued and resumes."
            )
        return Choice(requested, "requested")
    default = parse_minutes(cluster.time_default)
    if longest is not None and default > longest:
        return Choice(longest, f"time limit of partition {kind.partition}")
    return Choice(default, f"time_default of {cluster.path.name}")
