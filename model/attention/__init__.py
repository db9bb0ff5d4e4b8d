"""Attention: how a block attends, behind one function, with the ways to compute it as backends.

A forward pass makes one `layout.Layout` (documents, positions, and what the backend wants made of them) and gives it to
every block. A block does not look inside; its `module.Attention` calls `layout.attend(q, k, v, layout)`.

    module.py        Attention, with its weights, and KeyValueCache
    layout.py        Layout, and attend()
    backend.py       Backend, what a backend is; Documents, what it is given; Where, what it is asked about
    choosing.py      choose(): the configured backend, or the best one for a device, with the reason for a fallback
    sdpa.py by_document.py varlen.py flex.py    the backends

Only documents need a backend. A pass without them (`train.across_documents`, generation) is plain causal attention, for
which torch's own choice of kernel is the right one; it knows no sliding window, so with one, training across documents
gives the backend each row as a document, and generation a mask.

**To add a backend**, derive a class from `backend.Backend`; its docstrings say what each method is asked. Then either

- inside this package: put it into a file here and name it in BACKENDS (two files touched), or
- outside: nothing here changes. The setting takes the place of any class that can be imported,
  `train.attention=my_package.my_module:MyBackend`.

Then let `tests/model/test_backends.py` hold it to the others: add it to that file's list of ways, and it is compared
with the dense mask, output and gradients, over documents of one token, cut documents and shared heads.

Importing this package does not import torch: whoever checks a configuration needs the names only.
"""

BACKENDS = {
    "sdpa": "drover.model.attention.sdpa:Sdpa",
    "by_document": "drover.model.attention.by_document:ByDocument",
    "varlen": "drover.model.attention.varlen:Varlen",
    "flex": "drover.model.attention.flex:Flex",
}
"""The names that `train.attention` knows, beside `auto`, and where their classes are ("module:class")."""

AUTOMATIC = ("varlen", "by_document", "flex", "sdpa")
"""What `auto` takes: the first that can run. No dense mask where anything else can: sdpa is last."""
