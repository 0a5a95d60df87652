"""Inside vLLM: take new weights from safetensors files, where trainer and server share a disk but
no GPU network.

vLLM finds `register` through the entry point group ``vllm.general_plugins``, in every one of its
processes, and is started with ``--weight-transfer-config '{"backend": "burnish_files"}'``. This
folder is a distribution of its own, and imports nothing of burnish: on its PYTHONPATH, an
environment that has vLLM and nothing else finds it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "burnish_files"


def register() -> None:
    """Register the engine with vLLM; may be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory._registry.setdefault(BACKEND, _engine)


def _engine() -> Any:
    from safetensors import safe_open
    from vllm.distributed.weight_transfer import base
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.platforms import current_platform

    def forget_kernels(model: Any) -> dict[Any, Any]:
        """Have the experts of a CPU's model packed when their new weights are there.

        vLLM 0.32 packs the weights of experts for its CPU kernels only where a layer has no kernel
        yet. Later ones it would copy, not packed, into the memory of the packed ones, and answer
        from those. On GPUs nothing is packed so, and captured CUDA graphs refer to the kernels.

        Returns:
            the kernels, by the methods that had them.
        """
        kernels = {}
        if current_platform.is_cpu():
            for module in model.modules():
                # which several modules may share
                method: Any = getattr(module, "quant_method", None)
                packs = isinstance(method, UnquantizedFusedMoEMethod)
                if packs and method.moe_kernel is not None:
                    kernels[method] = method.moe_kernel
                    method.moe_kernel = None
        return kernels

    @dataclass
    class Init(base.WeightTransferInitInfo):  # type: ignore[misc]
        directory: str

    @dataclass
    class Update(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        path: str
        last: bool

    class Files(base.WeightTransferEngine):  # type: ignore[misc]
        """One update is any number of files, each with some of the parameters by their names in a
        checkpoint.
        """

        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Init) -> None:
            if not Path(init_info.directory).is_dir():
                raise ValueError(
                    f"{BACKEND}: {init_info.directory} is on no disk that the server sees"
                )

        def start_weight_update(self) -> None:
            self.kernels = forget_kernels(self.model)
            initialize_layerwise_reload(self.model)
            self.missing = {name for name, _ in self.model.named_parameters()}

        def receive_weights(self, update_info: Update) -> None:
            with safe_open(update_info.path, "pt", device="cpu") as file:
                self.missing -= self.model.load_weights(
                    (name, file.get_tensor(name))
                    for name in file.keys()  # noqa: SIM118
                )
            if update_info.last and self.missing:
                raise ValueError(
                    f"{BACKEND}: no weights came for {min(self.missing)}; is this another model?"
                )

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            for method, kernel in self.kernels.items():
                if method.moe_kernel is None:  # no weights came, and the former ones are back
                    method.moe_kernel = kernel

        def shutdown(self) -> None:
            pass

    return Files
