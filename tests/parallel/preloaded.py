"""What cases import, also late, imported once: every rank is a fork of the process that has imported this module."""

import gc
import importlib

for name in ("tests.parallel.train_steps", "torch.distributed.tensor.experimental", "torch.export._trace",
             "torch._inductor.compile_fx", "torch._inductor.compiler_bisector", "torch._subclasses.schema_check_mode",
             *(f"torch._dynamo.backends.{name}" for name in ("cudagraphs", "distributed", "inductor", "onnxrt",
                                                             "tensorrt", "torchxla", "tvm")),
             "torch._dynamo.repro.after_dynamo", "torch.fx.experimental.validator", "sympy.combinatorics",
             "sympy.tensor.tensor", "drover.model.attention.sdpa", "drover.model.attention.flex",
             "drover.pipeline.training.engine",
             "drover.pipeline.training.optimizers", "drover.pipeline.training.sinks",
             "drover.pipeline.contract.stage_work"):
    importlib.import_module(name)
gc.collect()
gc.freeze()  # else each rank's collector goes through all of this, and copies its pages
