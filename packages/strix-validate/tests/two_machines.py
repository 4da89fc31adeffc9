# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's executor for Ray on two machines without a GPU: python two_machines.py SOURCE CONFIG.json

The executor, its workers' processes, their queues and their groups are vLLM's; the worker's device
and its model are mocks, and so is the platform, in each process.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from strix_validate.models.choose import make_machine

MADE: list[Any] = []


def become_gfx1151() -> None:
    """What each of Ray's workers does first."""
    folder = Path(tempfile.mkdtemp())
    MADE.extend(make_machine(folder, Path(os.environ["VLLM_SOURCE"])))


class Worker:
    """Of vLLM's workers what its executor calls: groups over gloo, no device, no model."""

    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker):
        self.vllm_config, self.local_rank, self.rank = vllm_config, local_rank, rank
        self.method = distributed_init_method

    def init_device(self) -> None:
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        # RCCL's needs a device
        base = "vllm.distributed.device_communicators.base_device_communicator"
        name = f"{base}.DeviceCommunicatorBase"
        vars(current_platform)["get_device_communicator_cls"] = lambda: name
        world = self.vllm_config.parallel_config
        parallel_state.init_distributed_environment(
            world.world_size, self.rank, self.method, self.local_rank, "gloo"
        )
        parallel_state.initialize_model_parallel(
            world.tensor_parallel_size, world.pipeline_parallel_size, backend="gloo"
        )

    def load_model(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def meet(self) -> tuple[str, int, float]:
        """This node, its stage, and a sum over all."""
        import ray
        import torch
        from vllm.distributed import parallel_state

        total = torch.tensor([self.rank + 1.0])
        group = parallel_state.get_world_group().cpu_group
        torch.distributed.all_reduce(total, group=group)
        stage = parallel_state.get_pp_group().rank_in_group
        return ray.util.get_node_ip_address(), stage, total.item()


def main() -> None:
    os.environ["VLLM_SOURCE"] = sys.argv[1]
    become_gfx1151()
    import ray
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.executor.abstract import Executor

    vars(registry)["_run_in_subprocess"] = lambda function: function()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(Path(sys.argv[2]).read_text())
        made = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy",
            distributed_executor_backend="ray", pipeline_parallel_size=2,
            worker_cls="two_machines.Worker",
        ).create_engine_config()  # fmt: skip
    first = {
        "env_vars": {"VLLM_SOURCE": sys.argv[1]},
        "worker_process_setup_hook": "two_machines.become_gfx1151",
    }
    own = os.environ["VLLM_HOST_IP"]
    ray.init(os.environ["RAY_ADDRESS"], _node_ip_address=own, runtime_env=first)
    executor = Executor.get_class(made)(made)
    try:
        met = executor.collective_rpc("meet", timeout=60)
    finally:
        executor.shutdown()
    print(json.dumps({"executor": type(executor).__name__, "met": met}))
    ray.shutdown()


if __name__ == "__main__":
    main()
