"""The DeepSpeed configuration that transformers knows of, while models are built without one."""

import gc
import weakref

import pytest

from zerostart.upstream.transformers.loading import knowing_partitions, without_zero3


class Configuration:
    """Of transformers' HfDeepSpeedConfig what is asked here."""

    def is_zero3(self) -> bool:
        return True


def test_it_is_what_it_was() -> None:
    from transformers.integrations import deepspeed

    config = Configuration()
    deepspeed.set_hf_deepspeed_config(config)
    try:
        with without_zero3():
            assert not deepspeed.is_deepspeed_zero3_enabled()
            with knowing_partitions():
                assert deepspeed.is_deepspeed_zero3_enabled()
            assert not deepspeed.is_deepspeed_zero3_enabled()
        assert deepspeed._hf_deepspeed_config_weak_ref() is config
    finally:
        deepspeed.unset_hf_deepspeed_config()


def test_it_lives_no_longer_by_that() -> None:
    from transformers.integrations import deepspeed

    config = Configuration()
    deepspeed.set_hf_deepspeed_config(config)
    with pytest.raises(KeyError), without_zero3():
        raise KeyError
    assert deepspeed.is_deepspeed_zero3_enabled()
    gone = weakref.ref(config)
    del config
    gc.collect()
    assert gone() is None
    assert not deepspeed.is_deepspeed_zero3_enabled()
    deepspeed.unset_hf_deepspeed_config()
