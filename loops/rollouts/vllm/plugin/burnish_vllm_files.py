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
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

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

        def shutdown(self) -> None:
            pass

    return Files
