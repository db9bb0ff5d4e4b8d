"""Attention, with several backends behind one function.

A forward pass creates one `Layout` (documents, positions, and what the backend prepared for them) and gives it
to every block. Blocks pass it on to `Attention`, which calls the `attend` of its backend.

    module.py        Layout; Attention, with its weights; KeyValueCache
    backend.py       Backend, the interface; Documents, its input; Where, the device and types it must support;
                     choose(): the configured backend, or the best one for a device, with the reason for a fallback
    sdpa.py varlen.py flex.py    the backends

Only documents need a backend. A pass without them (`train.across_documents`, generation) is plain causal attention, for
which torch chooses the kernel.

**To add a backend**, derive a class from `backend.Backend`; its docstrings describe each method. Then either

- inside this package: put it into a file here and name it in BACKENDS (two files touched), or
- outside: nothing here changes. The setting accepts any class that can be imported,
  `train.attention=my_package.my_module:MyBackend`.

Then add it to the list WAYS in `tests/model/test_backends.py`. It is compared with the dense mask, output and
gradients, over documents of one token, cut documents and shared heads.

Importing this package does not import torch, because checks of a configuration need only the names.
"""

BACKENDS = {
    "sdpa": "drover.model.attention.sdpa:Sdpa",
    "by_document": "drover.model.attention.sdpa:ByDocument",
    "varlen": "drover.model.attention.varlen:Varlen",
    "flex": "drover.model.attention.flex:Flex",
}
"""The names for `train.attention` other than `auto`, and their classes ("module:class")."""

AUTOMATIC = ("varlen", "by_document", "flex", "sdpa")
"""The order of `auto`, which takes the first backend that can run. sdpa, a dense mask, is last."""
