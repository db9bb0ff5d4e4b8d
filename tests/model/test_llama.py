"""The decoder as a whole: names, causality, packing, losses, checkpointing, the meta device."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model.attention.layout import Layout
from model.config import ModelConfig
from model.llama import Block, FeedForward, Llama, initialise
from model.rope import RotaryTable

CONFIG = ModelConfig(dim=48, layers=2, heads=6, kv_heads=2, ffn_dim=64, vocab_size=50, context_length=32)


def built(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32, seed: int = 1) -> Llama:
    model = Llama(config)
    initialise(model, config, seed)
    # Larger than in training, so that attention is far from uniform and mistakes show.
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    return model.to(dtype)


def random_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_count(tied):
    config = CONFIG.model_copy(update={"tied_embeddings": tied})
    model = Llama(config)
    block = [
        *(f"attention.w{letter}.weight" for letter in "qkvo"),
        *(f"feed_forward.w{number}.weight" for number in "123"),
        "attention_norm.weight",
        "ffn_norm.weight",
    ]
    expected = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    expected |= {f"layers.{layer}.{name}" for layer in range(2) for name in block}
    assert set(model.state_dict()) == expected
    assert {name for name, _ in model.named_parameters()} == expected - ({"output.weight"} if tied else set())
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count
    assert list(model.buffers()) == []


def test_constructor_names_every_problem():
    config = ModelConfig(dim=100, heads=8, kv_heads=3)
    with pytest.raises(ValueError) as error:
        Llama(config)
    for part in ("dim (100)", "kv_heads (3)", "vocab_size is None"):
        assert part in str(error.value)


def test_rms_norm():
    norm = Llama(CONFIG).norm
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)) * 7
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert torch.allclose(norm(x), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(norm(1000 * x), norm(x), rtol=1e-4)
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), expected, rtol=0.02, atol=0.02)


def test_feed_forward_is_swiglu():
    layer = FeedForward(CONFIG).double()
    x = torch.randn(3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = x @ layer.w1.weight.T, x @ layer.w3.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ layer.w2.weight.T
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


def test_block_is_the_identity_without_writers():
    block = Block(CONFIG)
    x = torch.randn(1, 5, 48)
    layout = Layout(RotaryTable(CONFIG).at(torch.arange(5)[None], torch.float32))
    assert not torch.equal(block(x, layout), x)
    torch.nn.init.zeros_(block.attention.wo.weight)
    torch.nn.init.zeros_(block.feed_forward.w2.weight)
    assert torch.equal(block(x, layout), x)


def test_causal():
    model, tokens = built(), random_tokens(2, 12)
    before = model(tokens)
    tokens[:, 7] = (tokens[:, 7] + 1) % 50
    after = model(tokens)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_order_of_tokens_matters():
    model, tokens = built(), random_tokens(1, 8)
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-4)


def test_no_attention_across_documents():
    model, tokens = built(), random_tokens(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 5 + [8] * 7])
    before = model(tokens, documents=documents)
    changed = tokens.clone()
    changed[:, :5] = (changed[:, :5] + 1) % 50
    after = model(changed, documents=documents)
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, :5], after[:, :5])
    # The test can fail: without document numbers the change is seen.
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_no_gradient_across_documents():
    model = built()
    tokens = torch.cat([random_tokens(1, 5) % 25, random_tokens(1, 7) % 25 + 25], dim=1)
    labels = tokens.clone()
    labels[:, :5] = -100
    model(tokens, labels, documents=torch.tensor([[0] * 5 + [1] * 7])).backward()
    gradient = model.tok_embeddings.weight.grad
    assert gradient[:25].eq(0).all()
    assert gradient[tokens[0, 5:]].ne(0).any(dim=1).all()


def test_packed_documents_equal_each_alone():
    model = built(dtype=torch.float64)
    first, second = random_tokens(1, 5), random_tokens(1, 9, seed=1)
    packed = model(
        torch.cat([first, second], dim=1),
        documents=torch.tensor([[0] * 5 + [1] * 9]),
        positions=torch.cat([torch.arange(5), torch.arange(9)])[None],
    )
    assert torch.allclose(packed[:, :5], model(first), rtol=0, atol=1e-12)
    assert torch.allclose(packed[:, 5:], model(second), rtol=0, atol=1e-12)


def test_one_document_equals_no_documents():
    model, tokens = built(), random_tokens(2, 9)
    masked = model(tokens, documents=torch.zeros_like(tokens))
    assert torch.allclose(masked, model(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_plain_way(tied):
    model = built(CONFIG.model_copy(update={"tied_embeddings": tied}), torch.float64)
    tokens, labels = random_tokens(2, 9), random_tokens(2, 9, seed=1)
    labels[0, :4] = -100
    loss = model(tokens, labels)
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert logits.dtype == loss.dtype == torch.float64 and loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    parameters = list(model.parameters())
    pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True)
    assert all(torch.allclose(actual, golden, rtol=0, atol=1e-12) for actual, golden in pairs)


def test_loss_of_each_token():
    model, tokens, labels = built(), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    labels[1, 3] = -100
    losses = model(tokens, labels, reduction="none")
    assert losses.shape == (2, 9) and losses.dtype == torch.float32 and not losses.requires_grad
    assert losses[1, 3] == 0 and losses[0].gt(0).all()
    assert losses.sum().item() == pytest.approx(model(tokens, labels).item(), rel=1e-6)


def test_bfloat16_parameters():
    exact, model = built(), built(dtype=torch.bfloat16)
    tokens, labels = random_tokens(2, 20), random_tokens(2, 20, seed=1)
    logits = model(tokens)
    assert logits.dtype == torch.float32
    assert (logits - exact(tokens)).norm() / exact(tokens).norm() < 0.05
    loss = model(tokens, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    assert {key[1] for key in model.rotary_table._tables} == {torch.float32}


def test_activation_checkpointing_changes_no_bit(monkeypatch):
    model, tokens, labels = built(), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2)
    model(tokens, labels, documents=documents).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    calls = []
    forward = Block.forward

    def checkpointed(self, *arguments):
        def counted(*inner):
            calls.append(self)
            return forward(self, *inner)

        return checkpoint(counted, *arguments, use_reentrant=False)

    monkeypatch.setattr(Block, "forward", checkpointed)
    model(tokens, labels, documents=documents).backward()
    assert len(calls) == 2 * CONFIG.layers  # forward, and again in backward
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))


def test_tied_matrix_is_one_parameter_and_survives_moves():
    config = CONFIG.model_copy(update={"tied_embeddings": True})
    with torch.device("meta"):
        model = Llama(config)
    assert model.output.weight is model.tok_embeddings.weight
    model.to_empty(device="cpu")
    initialise(model, config, seed=1)
    assert model.output.weight is model.tok_embeddings.weight
    model.to(torch.float64)
    assert model.output.weight is model.tok_embeddings.weight


def test_model_from_the_meta_device_computes_the_same():
    with torch.device("meta"):
        model = Llama(CONFIG)
    model.to_empty(device="cpu")
    initialise(model, CONFIG, seed=3)
    direct = Llama(CONFIG)
    initialise(direct, CONFIG, seed=3)
    assert torch.equal(model(random_tokens(1, 8)), direct(random_tokens(1, 8)))


def test_refusals():
    model = built()
    with pytest.raises(ValueError, match=r"33 tokens; context_length is 32"):
        model(random_tokens(1, 33))
    with pytest.raises(ValueError, match=r"labels is \(1, 4\), tokens is \(1, 5\)"):
        model(random_tokens(1, 5), random_tokens(1, 4))
    with pytest.raises(ValueError, match=r"documents is \(1, 4\)"):
        model(random_tokens(1, 5), documents=random_tokens(1, 4))
