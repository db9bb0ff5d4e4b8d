"""Every way to compute attention inside documents against the dense mask, and the choice among them."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from drover.model.attention import AUTOMATIC, BACKENDS
from drover.model.attention.backend import Backend, Documents, Where, choose, load
from drover.model.attention.flex import Flex, first_tokens, rule
from drover.model.attention.sdpa import ByDocument, Sdpa
from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from tests.model import varlen_on_cpu
from tests.model.agreement import agree
from tests.model.varlen_on_cpu import VarlenOnCpu
from tests.refusal import refused, table

WAYS: list[Backend] = [Sdpa(), ByDocument(), VarlenOnCpu()]
"""With a backward pass on a CPU. A new backend belongs here."""

ROWS = {
    "whole rows": [[16], [16]],
    "of one token": [[1] * 16, [1] * 16],
    "mixed": [[1, 9, 1, 5], [7, 9]],
    "one token at the edges": [[1, 15], [15, 1]],
    "equal neighbours": [[4, 4, 8], [4, 4, 4, 4]],
}
CONFIG = ModelConfig(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=64, vocab_size=50, context_length=32)


def numbered(rows):
    """(batch, length) int32: numbers of the documents, each row from 0, as the loader gives them."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]).int()


def flat(rows):
    return [length for row in rows for length in row]


def inputs(rows, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (len(rows), sum(rows[0]))
    return [torch.randn(*shape, heads, 8, generator=generator, dtype=dtype).requires_grad_()
            for heads in (6, kv_heads, kv_heads)]


def attended(backend, three, rows, **known):
    return backend.attend(*three, backend.prepare(Documents(numbered(rows), **known), three[0].dtype))


def names(backend):
    return backend.name


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("backend", WAYS[1:], ids=names)
def test_each_way_equals_the_dense_mask_forward_and_backward(backend, kv_heads, rows):
    three = inputs(rows, kv_heads)
    agree(attended(backend, three, rows, lengths=flat(rows)), attended(WAYS[0], three, rows), three)


@pytest.mark.parametrize("backend", WAYS, ids=names)
@pytest.mark.parametrize("tied", [False, True])
def test_packed_equals_each_document_alone_in_loss_and_every_gradient(backend, tied):
    config = CONFIG.model_copy(update={"tied_embeddings": tied})
    model = Llama(config).double()
    initialise(model, config, seed=0)
    rows = [[1, 9, 6], [15, 1]]
    tokens, labels = (torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    positions = torch.cat([torch.arange(length) for length in flat(rows)]).view(2, 16)
    parts = zip(*(whole.flatten().split(flat(rows)) for whole in (tokens, labels)), strict=True)
    alone = sum(model(own[None], wanted[None]) for own, wanted in parts)
    model.backend = backend
    packed = model(tokens, labels, documents=numbered(rows), document_lengths=flat(rows), positions=positions)
    assert packed.item() == pytest.approx(alone.item(), rel=1e-13)
    agree(packed, alone, list(model.parameters()), value=1e-10)


def test_lengths_are_read_where_the_loader_did_not_give_them():
    """A document's number that goes on in the next row is another document there."""
    for rows in ROWS.values():
        assert Documents(numbered(rows)).lengths == tuple(flat(rows))
    cut = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]])
    assert Documents(cut).lengths == (2, 2, 3, 1)
    with pytest.raises(ValueError, match="have 7 tokens together; there are 8"):
        _ = Documents(cut, [3, 4]).lengths


def test_neighbours_of_one_length_are_one_call_and_short_rows_in_half_precision_take_the_mask():
    """Which is faster there."""
    def runs(rows, dtype=torch.float32):
        """(documents, length) of each run, which has as many keys and no mask."""
        prepared = ByDocument().prepare(Documents(numbered(rows)), dtype)
        assert isinstance(prepared, torch.Tensor) or all(run.keys == run.length and run.mask is None
                                                         for run in prepared)
        return "mask" if isinstance(prepared, torch.Tensor) else [run[:2] for run in prepared]

    assert runs([[4, 4, 8], [8, 8]]) == [(2, 4), (3, 8)]
    assert runs([[128, 128]]) == [(2, 128)] and runs([[128, 128]], torch.bfloat16) == "mask"
    assert runs([[256, 256]], torch.bfloat16) == [(2, 256)]


def test_varlen_is_given_padded_edges_and_unrepeated_heads():
    """A compiled graph meets few shapes: numbers of documents and the longest are rounded up to powers of two."""
    prepared = VarlenOnCpu().prepare(Documents(numbered([[5, 3, 8], [9, 7]])), torch.bfloat16)
    assert prepared.edges.tolist() == [0, 5, 8, 16, 25, 32, 32, 32, 32] and prepared.longest == 16
    shapes = {len(VarlenOnCpu().prepare(Documents(numbered([[1] * count + [64 - count]])), torch.bfloat16).edges)
              for count in range(1, 64)}
    assert shapes == {3, 5, 9, 17, 33, 65}
    assert VarlenOnCpu().prepare(Documents(numbered([[9, 2], [11]])), torch.bfloat16).longest == 11, "no row is longer"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_flex_is_given_the_dense_masks_rule(rows):
    documents, length = Documents(numbered(rows)), sum(rows[0])
    seen = create_mask(rule(first_tokens(documents)), len(rows), 1, length, length, device="cpu")
    assert torch.equal(seen, Sdpa().prepare(documents, torch.float32) == 0)
    three = [whole.detach() for whole in inputs(rows)]
    result, expected = (attended(way, three, rows) for way in (Flex(), WAYS[0]))
    assert torch.allclose(result, expected, rtol=0, atol=1e-13)


CPU = Where(torch.device("cpu"), torch.float32, compiled=False, head_dim=64)


def on_gpu(monkeypatch, capability=(9, 0), **changes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    usual = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "compiled": True, "head_dim": 128}
    return Where(**{**usual, **changes})


def test_on_a_cpu_auto_goes_document_by_document_and_says_why_it_does_not():
    assert (choose("auto", CPU).backend.name, choose("auto", CPU).fallback) == ("by_document", "")
    compiled = choose("auto", replace(CPU, compiled=True))
    assert compiled.backend.name == "sdpa"
    assert compiled.fallback == ("by_document cannot be compiled, because every batch has documents of other lengths, "
                                 "so sdpa computes attention inside documents")


@pytest.mark.parametrize("changes, capability, name, why", [
    ({}, (9, 0), "varlen", ""),
    ({"dtype": torch.float32}, (9, 0), "flex", "varlen needs bfloat16, not float32, so flex"),
    ({"dtype": torch.float32, "compiled": False}, (9, 0), "by_document", "varlen needs bfloat16, not float32"),
    ({"dtype": torch.float64}, (9, 0), "sdpa", "varlen needs bfloat16, not float64, so sdpa"),
    ({}, (7, 5), "flex", "varlen needs compute capability 8.0, not 7.5"),
    ({"head_dim": 20}, (9, 0), "flex", "varlen needs heads of a multiple of 8 up to 256, not 20"),
])
def test_on_a_gpu_auto_takes_varlen_where_it_can_and_says_why_it_does_not(monkeypatch, changes, capability, name, why):
    choice = choose("auto", on_gpu(monkeypatch, capability, **changes))
    assert choice.backend.name == name and choice.fallback.startswith(why) and bool(choice.fallback) == bool(why)


@pytest.mark.parametrize("name, needed, says", table("""
    varlen -> none -> 'varlen' needs a GPU, not a cpu device. Take auto, which is by_document here
    flex -> none -> 'flex' has no backward pass on a cpu device
    by_document -> compiled -> 'by_document' cannot be compiled
    flex -> segmented -> 'flex' knows no context parallelism. Take auto, which is by_document here
    flash -> none -> 'flash' is not known. Take auto, sdpa, by_document, varlen, flex, or another class
    nowhere.to_be:Found -> none -> cannot be loaded: No module named 'nowhere'
    drover.model.attention.sdpa:Sdpb -> none -> has no attribute 'Sdpb'
    drover.model.attention.backend:Documents -> none -> is no class derived from"""))
def test_what_is_asked_for_by_name_and_cannot_be_had_is_an_error(name, needed, says):
    where = CPU if needed == "none" else replace(CPU, **{needed: True})
    refused(ValueError, says, choose, name, where)


def test_a_backend_from_outside_is_taken_by_its_place():
    assert isinstance(choose(varlen_on_cpu.NAME, CPU).backend, VarlenOnCpu)
    assert {load(name).name for name in BACKENDS} == set(BACKENDS) == set(AUTOMATIC)
