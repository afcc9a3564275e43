"""Runs of Bootstrapping ViTs: training, resume, compilation and refused options.

test_ranks covers several ranks.
"""

import math
from contextlib import closing
from functools import partial

import pytest
import torch
from timm.layers import convert_sync_batchnorm
from torch.nn import functional as F

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.models.agent_cnn import AgentCNN
from densefeed.models.meta_device import meta_device
from densefeed.objectives import bootstrapping
from densefeed.objectives.base import step_loss
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training.ranks import Ranks
from densefeed.training.setup import setup_run
from densefeed.training.student import build_student, update

from ..runs import first_batch, model_for, objective_for, records, wrapped_and_first_batch

ALONE = Ranks(0, 1, torch.device("cpu"))
# Two blocks: at 32 pixels the agent's maps are 4 x 4 and 2 x 2, and its last one is 1 x 1.
JOINT = dict(
    model="bootstrapping_vit_micro",
    model_kwargs=("depth=2",),
    objective="ce",
    mixtoken=False,
    bootstrap="joint",
)
SHARED = JOINT | dict(bootstrap="shared")
DENSE = dict(
    model="lvvit_micro",
    model_kwargs=("num_heads=6", "depth=2"),
    objective="token-label",
    mixtoken=False,
    bootstrap="shared",
    feature_adapt="pool-2d",
)


@pytest.fixture
def config(micro, tmp_path):
    return lambda **fields: micro(tmp_path / "run", **(JOINT | fields))


# ------------------------------------------------------------------------- whole runs


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "fields",
    [
        JOINT
        | dict(
            objective="relabel",
            cutmix=1.0,
            mixup=0.8,
            feature_decay="none",
            agent_kwargs=("norm='after'", "pool=3"),
            epochs=1,
        ),
        JOINT
        | dict(
            precision="fp16",
            epochs=1,
            feature_weight=0.0,
            agent="base",
            feature_norm="layernorm",
            on_nonfinite="skip",
        ),
        SHARED
        | dict(
            cutmix=1.0,
            microbatch=2,
            clip_grad=1.0,
            sizes=((0, 32), (1, 64)),
            grad_checkpointing=True,
        ),
        SHARED | dict(precision="bf16", epochs=1, distill_weight=0.0, align="none"),
        DENSE
        | dict(
            bootstrap="joint",
            model_kwargs=("num_heads=6", "depth=2", "fused_head=True"),
            cutmix=1.0,
            epochs=1,
            maps_on_device=True,
        ),
        DENSE
        | dict(agent="base", epochs=1, feature_adapt="sequence", cutmix=1.0, mix_label="regions"),
        SHARED
        | dict(
            model="t2t_vit_14",
            model_kwargs=("depth=2", "embed_dim=48", "token_dim=16"),
            size=64,
            epochs=1,
        ),
    ],
)
def test_checkpoint_holds_transformer_and_both_are_evaluated(micro, tmp_path, capsys, fields):
    """The checkpoint is the transformer's, readable by every tool; the agent is beside it."""
    out = tmp_path / "run"
    result = training.train(micro(out, **fields))
    assert {"top1", "top1_ema", "top1_agent"} <= set(result)
    assert all(math.isfinite(r["loss"]) for r in records(out))
    model, checkpoint = checkpoints.build(out / "last.pt")
    run = micro(out, **fields)
    alone = model_for(with_options(run, bootstrap="none"))
    assert set(model.state_dict()) == set(alone.state_dict()) == set(checkpoint["ema"])
    own = [name for name in checkpoint["agent"] if "fc1" in name]
    assert bool(own) == (fields["bootstrap"] == "joint")
    count = sum(p.numel() for p in objective_for(run).build_agent(alone, 2).parameters())
    assert (
        f", and {count:,} that --bootstrap {fields['bootstrap']} trains beside them, on cpu"
        in capsys.readouterr().out
    )


def test_dry_run_counts_memory_of_both_networks(config, capsys):
    for bootstrap in ("none", "joint"):
        training.train(config(bootstrap=bootstrap, dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    alone, both = (float(line.partition("take about ")[2].split()[0]) for line in lines)
    assert both >= alone + 0.005  # 0.5 M parameters of the agent, four times 4 bytes each


@pytest.mark.slow
def test_dry_run_counts_gradients_of_shared_weights(config, capsys, monkeypatch):
    """10 D² numbers and 6 D biases in each of two blocks, D = 936: 70 MB.

    The activations of the agent are the same with and without them.
    """
    kwargs = dict(bootstrap="shared", model_kwargs=("depth=2", "embed_dim=936"), dry_run=True)
    training.train(config(**kwargs))
    monkeypatch.setattr(AgentCNN, "shared_tensors", lambda agent: [])
    training.train(config(**kwargs))
    memory = [
        float(line.partition("take about ")[2].split()[0])
        for line in capsys.readouterr().out.splitlines()
    ]
    # Printed in steps of 0.01 GB.
    assert memory[0] - memory[1] == pytest.approx(2 * (10 * 936**2 + 6 * 936) * 4 / 1e9, abs=0.011)


@pytest.mark.parametrize("bootstrap", ["joint", "shared"])
def test_sync_batchnorm_converts_both_networks(config, monkeypatch, bootstrap):
    """As on several ranks; shared weights stay shared."""
    monkeypatch.setattr(Ranks, "synchronized", lambda ranks, model: convert_sync_batchnorm(model))
    run = setup_run(config(bootstrap=bootstrap, sync_batchnorm=True), ALONE)
    with closing(run.loader), closing(run.val):
        kinds = {
            type(module)
            for module in run.student.trainable.modules()
            if "BatchNorm" in type(module).__name__
        }
        assert kinds == {torch.nn.SyncBatchNorm}
        both = run.student.trainable
        for lent, block in zip(both.agent.shared_weights, both.vit.blocks, strict=True):
            assert (lent is None) == (bootstrap == "joint")
            assert lent is None or lent.fc1.data_ptr() == block.mlp.fc1.weight.data_ptr()


def test_error_names_nonfinite_weight_of_agent(config, monkeypatch):
    build = bootstrapping.make_agent

    def poisoned(*arguments, **options):
        agent = build(*arguments, **options)
        if not next(agent.parameters()).is_meta:
            with torch.no_grad():
                agent.norm.bias.fill_(math.nan)
        return agent

    monkeypatch.setattr(bootstrapping, "make_agent", poisoned)
    with pytest.raises(
        UserError,
        match=r"the gradients of step 1 are not finite; the weight agent\.norm\.bias is the first",
    ):
        training.train(config())


# ------------------------------------------------------------------------- a step


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_outside_step_loss_matches_paper(config, weight):
    """With image labels: two cross entropies, two divergences and the features, in float64.

    The decay is that of the second of 4 epochs. --distill-weight scales the divergences alone, not
    the cross entropies, which the paper's L_mutual includes.
    """
    run = config(epochs=4, smoothing=0.0, drop_path=0.0, distill_weight=weight)
    both, first = wrapped_and_first_batch(run)
    batch = first.batch
    assert first.context(epoch=1).inputs[0].item() == 0.75
    ours = first.loss(both.eval(), 2, epoch=1)
    with torch.no_grad():
        output = both(batch.image)
    own = sum(
        F.cross_entropy(logits.double(), batch.label) for logits in (output.vit, output.agent)
    )
    p, q = ((logits.double() / 4).softmax(1) for logits in (output.vit, output.agent))
    soft = 16 * ((p * (p / q).log()).sum(1).mean() + (q * (q / p).log()).sum(1).mean())
    features = 0.0
    for x, y in zip(output.tokens, output.maps, strict=True):
        y = y.flatten(2).mT.double()
        x = x.double().unflatten(1, (y.shape[1], -1)).mean(2)
        features += (2 - 2 * F.cosine_similarity(x, y, dim=2)).mean()
    assert [y.flatten(2).shape[2] for y in output.maps] == [16, 4]
    total = own + weight * soft + 10 * 0.75 * features
    assert ours.item() == pytest.approx(total.item(), rel=1e-5)


def test_both_networks_use_score_maps(config):
    """Dense labels of each network's own grid, in float64.

    The transformer has 4 x 4 tokens, the last map of the agent 1 position.
    """
    run = config(**DENSE, distill_weight=0.0, feature_weight=0.0, drop_path=0.0)
    both, first = wrapped_and_first_batch(run)
    batch, spec, rules = first.batch, first.spec, TargetRules(smoothing=0.1)
    ours = first.loss(both.train(), 4)
    with torch.no_grad():
        joint, want = both(batch.image), 0.0
    for output, grid in ((joint.vit, 4), (joint.agent, 1)):
        assert output.tokens.shape[1] == grid**2
        for logits, side, factor in ((output.cls[:, None], 1, 1.0), (output.tokens, grid, 0.5)):
            targets = sparse_targets(batch, spec, side, rules)
            full = targets.base.double()[..., None].repeat(1, 1, 2)
            full.scatter_add_(
                2, targets.palette[:, None].expand(-1, side**2, -1), targets.extra.double()
            )
            loss = -(full * logits.double().log_softmax(-1)).sum(-1)
            want += factor * (loss * targets.weight).sum() / targets.weight.sum()
    assert ours.item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        JOINT | dict(model_kwargs=("depth=1",)),
        DENSE | dict(model_kwargs=("num_heads=6", "depth=1")),
    ],
    ids=["joint", "shared, dense"],
)
def test_step_compiles_once_for_all_boxes_and_epochs(config, fields):
    """No graph break, no recompilation as the feature weight decays, results of eager mode."""
    run = config(**fields, agent_kwargs=("down=(1,)",), cutmix=1.0, drop_path=0.0, epochs=4)
    both, first = wrapped_and_first_batch(run)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(step_loss, fullgraph=True, backend="aot_eager", dynamic=False)
    for epoch in range(3):
        context = first.context(4, first.mixing.draw(epoch, 0, 32, 4), epoch)
        found = []
        for function in (step_loss, step):
            both.zero_grad()
            loss = function(first.objective, both, first.batch, context, None)
            loss.backward()
            both.combine_gradients(lambda gradients: None)
            found.append(
                (loss.detach(), *(parameter.grad.clone() for parameter in both.parameters()))
            )
        torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_blocks_of_both_networks_are_compiled(config, monkeypatch, tmp_path):
    """Each kind once: blocks of the transformer and of the agent, patch embedding, loss.

    Without code generation.
    """
    compiler, compiled = torch.compile, []

    def without_code(function, **options):
        compiled.append(type(getattr(function, "__self__", function)).__name__)
        return compiler(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", without_code)
    torch._dynamo.reset()
    plain_run = training.train(config(epochs=1, drop_path=0.0))
    losses = [r["loss"] for r in records(tmp_path / "run")]
    other = config(epochs=1, drop_path=0.0, compile="blocks")
    compiled_run = training.train(with_options(other, out=tmp_path / "compiled"))
    assert [r["loss"] for r in records(tmp_path / "compiled")] == pytest.approx(losses, rel=1e-4)
    assert plain_run.keys() == compiled_run.keys()
    # The last two are the loss and the mask of MixToken.
    assert compiled == ["Block"] * 2 + ["AgentBlock"] * 2 + ["PatchEmbed", "function", "function"]


@pytest.mark.parametrize(
    "fields", [JOINT, SHARED, SHARED | dict(align="none", clip_grad=1.0, on_nonfinite="skip")]
)
def test_update_does_not_sync(config, no_host_read, fields):
    run = config(**fields, ema=0.0)
    both, first = wrapped_and_first_batch(run)
    student = build_student(run.optim, both.vit, both, ALONE, None)
    context = first.context(4, epoch=1)

    def loss():
        return step_loss(first.objective, student.network, first.batch, context, None)

    with no_host_read():
        mean, norm = update(student, ALONE, 0, [loss, loss])
    assert mean.isfinite()
    assert norm > 0
    # There is still one set of weights.
    if both.shared:
        assert (
            both.agent.shared_weights[0].fc1.data_ptr()
            == both.vit.blocks[0].mlp.fc1.weight.data_ptr()
        )
        assert all(seen.grad is None for lent in both.agent.shared_weights for seen in lent)


def test_loss_scale_does_not_change_aligned_gradients(config):
    """Gradients are aligned while scaled by 1,024, a power of two: the update is bit-identical.

    It is SGD's, since the first update of Adam hardly depends on the size of a gradient.
    """
    weights = []
    for scale in (1.0, 1024.0):
        run = config(**SHARED, align="global", ema=0.0, drop_path=0.0)
        both, first = wrapped_and_first_batch(run)
        student = build_student(run.optim, both.vit, both, ALONE, None)
        student = student._replace(
            scaler=torch.amp.GradScaler("cpu", init_scale=scale),
            optimizer=torch.optim.SGD(both.parameters(), lr=1.0),
        )
        update(student, ALONE, 0, [partial(first.loss, student.network, 4)])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in both.parameters()]))
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("decay", "shares"), [("linear", [1.0, 0.75, 0.5, 0.25]), ("none", [1.0] * 4)]
)
def test_feature_weight_decay(config, decay, shares):
    run = config(epochs=3, cooldown_epochs=1, feature_decay=decay)
    first = first_batch(run)
    assert [first.context(epoch=epoch).inputs[0].item() for epoch in range(4)] == shares


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(drloc="l1", drloc_grid=0),
            "--drloc and --bootstrap cannot be combined: each trains a model with additions",
        ),
        (
            dict(frozen_statistics=True),
            "the network that --bootstrap joint adds begins without any",
        ),
        (
            dict(model="dhvt_tiny_cifar_patch4"),
            "dhvt_tiny_cifar_patch4 cannot have this agent .DHVT's attention adds head tokens",
        ),
        (
            dict(mixtoken=True, model="lvvit_micro"),
            "MixToken exchanges tokens, which an agent CNN does not have",
        ),
        (DENSE | dict(feature_adapt="sequence"), "give --feature-adapt pool-2d, or --agent base"),
        (dict(distill_temperature=0.0), "--distill-temperature is 0, and must be at least 0.001"),
        (dict(feature_weight=-1.0), "--feature-weight is -1, and must be at least 0"),
        (
            dict(model="nfnet_micro", model_kwargs=()),
            "nfnet_micro cannot have this agent .it has no blocks of attention",
        ),
        (dict(feature_blocks=(1, 3)), "--feature-blocks 1 3: .*micro has blocks 1 to 2; name each"),
        (dict(feature_blocks=(1, 1)), "--feature-blocks 1 1: .*name each at most once"),
        (dict(agent_kwargs=("down=(9,)",)), r"down \(9,\) must be numbers of blocks, from 1 to 2"),
        (dict(agent_kwargs=("down=3",)), r"down 3 must be numbers of blocks, from 1 to 2"),
        (
            dict(agent_kwargs=("depth=1",)),
            "--agent-kwargs takes down, pool and norm, not depth; the rest of an agent",
        ),
        (dict(agent_kwargs=("pool",)), "--agent-kwargs 'pool' is not NAME=VALUE"),
        (dict(agent_kwargs=("pool=5",)), r"\(pool 5 must be one of 2, 3\)"),
        (
            dict(agent="base", agent_kwargs=("pool=3",)),
            r"\(pool 3 is for a res-like stem; a base stem has no max-pool\)",
        ),
        (
            dict(model_kwargs=("depth=2", "patch_drop_rate=0.3")),
            "cannot have this agent .it uses patch dropout in training",
        ),
        (
            dict(SHARED, model_kwargs=("depth=2", "patch_drop_rate=0.5")),
            "cannot have this agent .it uses patch dropout in training",
        ),
        (
            dict(size=16, agent_kwargs=("down=(1,2)",)),
            "cannot train at 16 px .block 2 has a map of 1 x 1, which cannot be halved",
        ),
        (
            dict(sizes=((0, 32), (1, 40))),
            r"cannot train at 40 px .* --sizes or --multi-scale \(32 or 48 px fit\), --agent",
        ),
        (
            dict(size=72),
            r"72 px \(81 tokens .* to 16\); choose another --size \(64 or 80 px fit\), --agent",
        ),
    ],
)
def test_error_on_conflicting_options_before_first_step(config, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        training.train(config(**fields))
    assert not (tmp_path / "run" / "checkpoints").exists()


NO_BLOCKS = r"it has no blocks of attention \(qkv, proj\) and MLP \(fc1, fc2\)"
NOT_PLAIN = (
    "its attention, {}, is not known to return a mean of values for each head and nothing else"
)
NARROW = "depth=2", "num_heads=6", "embed_dim=96"
# Arguments, and the reason why there is no agent; None: there is one.
TRANSFORMERS = {
    "deit_small_patch16_224": (("depth=2",), None),
    "deit_small_distilled_patch16_224": (("depth=2",), None),
    "lvvit_s": (("depth=2",), None),
    "t2t_vit_14": (("depth=2",), None),
    # 3, 4, 4, 12 and 16 heads: squares without a center
    "deit_tiny_patch16_224": (("depth=2",), None),
    "lvvit_t": (("depth=2",), None),
    "t2t_vit_7": (("depth=2",), None),
    "vit_base_patch16_224": (("depth=2",), None),
    "vit_large_patch16_224": (("depth=2",), None),
    # Also with a plain MLP.
    "dhvt_small_imagenet_patch16": (
        ("depth=2", "feed_forward='mlp'", "aggregate='none'"),
        "DHVT's attention adds head tokens and its MLP, DAFF, contains convolutions",
    ),
    "beit_base_patch16_224": (NARROW, None),
    "vit_relpos_base_patch16_224": (NARROW, None),
    "vit_base_patch16_rope_224": (NARROW, None),
    "vit_small_r26_s32_224": (("depth=2",), None),
    "cait_xxs24_224": (("depth=1", "num_heads=6"), NOT_PLAIN.format(r"cait\.TalkingHeadAttn")),
    "xcit_nano_12_p16_224": (("depth=1", "num_heads=8"), NOT_PLAIN.format(r"xcit\.XCA")),
    "vit_dlittle_patch16_reg1_gap_256": (
        ("depth=1",),
        NOT_PLAIN.format(r"diff_attention\.DiffAttention"),
    ),
    "beit3_base_patch16_224": (NARROW, "a norm lies between the weights"),
    "vit_base_patch16_clip_quickgelu_224": (NARROW, "its MLP uses QuickGELU, an agent uses GELU"),
    "naflexvit_base_patch16_gap": (
        NARROW,
        "it has no patch_embed that gives the size of its patches",
    ),
    "cvt_13": (("depths=(1,1,1)",), NO_BLOCKS),
    "swin_tiny_patch4_window7_224": (("depths=(1,1,1,1)",), NO_BLOCKS),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_with_and_without_agents(config, name):
    """Agents exist for plain blocks with any number of heads, whoever has the weights.

    Other models are refused with the reason.
    """
    arguments, why = TRANSFORMERS[name]
    for bootstrap in ("joint", "shared"):
        size = 256 if "256" in name else 224
        run = config(model=name, model_kwargs=arguments, size=size, bootstrap=bootstrap)
        with meta_device():
            model = model_for(run)
        if why is None:
            objective_for(run).check_sizes(model, 2)
            continue
        with pytest.raises(
            UserError,
            match=rf"{bootstrap}: {name} cannot have this agent \({why}.*; choose another",
        ):
            objective_for(run).check_sizes(model, 2)


def test_feature_blocks_are_the_terms_of_equation_7(config):
    """The losses of single blocks sum to that of all, which is that of none named."""
    model, found = wrapped_and_first_batch(config())
    output = model(found.batch.image)
    weight = found.batch.weight

    def features(*blocks: int) -> torch.Tensor:
        objective = objective_for(config(feature_blocks=blocks))
        return objective.feature_loss(output.tokens, output.maps, weight)

    assert features(1) != features(2)
    torch.testing.assert_close(features(1) + features(2), features())
    torch.testing.assert_close(features(2, 1), features())
