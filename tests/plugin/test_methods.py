"""The methods are what they say."""

from nerfstudio.configs.method_configs import method_configs

from ns_multigpu.methods import splatfacto_batch


def test_recipe_is_splatfactos() -> None:
    ours, theirs = splatfacto_batch.config, method_configs["splatfacto"]
    assert ours.optimizers == theirs.optimizers
    for name in ("steps_per_eval_image", "steps_per_eval_batch", "steps_per_save", "steps_per_eval_all_images"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.max_num_iterations == theirs.max_num_iterations
    model, base = vars(ours.pipeline.model), vars(theirs.pipeline.model)
    assert {k: model[k] for k in base if k != "_target"} == {k: v for k, v in base.items() if k != "_target"}
