"""`wrap` puts lookahead decoding into a model's generate(); `unwrap` takes it out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from transformers import GenerationMixin, PreTrainedModel

from lookahead.compat import is_compiled_wrapper
from lookahead.config import LookaheadConfig
from lookahead.engine import loop
from lookahead.engine.engine import Lookahead, check_settings
from lookahead.guessing.bigrams import new_pool
from lookahead.guessing.source import GuessSource
from lookahead.models.state import forget, state_of
from lookahead.passes import packed
from lookahead.passes.capabilities import find_adapter, forget_refusals, fused_runner
from ngram_pool import NgramPool
from ngram_pool.waiting import told_if_long


class LookaheadMixin:
    """Replaces the loops that generate() runs: `wrap` puts this class before the model's own.

    generate() itself stays the model's. It prepares processors, criteria and the rest, then calls a loop by its name on
    the class.
    """

    lookahead: Lookahead

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine, own = _engine(self), _own_method(self, "_sample")
        if engine is None:
            return own(self, *args, **kwargs)
        return loop.run(engine, own, self, *args, **kwargs)

    def _beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if engine := _engine(self):
            engine.decode_plainly(self, "beam search")
        return _own_method(self, "_beam_search")(self, *args, **kwargs)

    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        from lookahead.engine.assisted import run  # other calls have no assistant model

        return run(_engine(self), _own_method(self, "_assisted_decoding"), self, *args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        reduced: tuple = super().__reduce_ex__(protocol)  # type: ignore[assignment]  # no name
        _, (cls, *_), *rest = reduced  # other protocols than 2 also name the class that makes an empty object
        return _new_wrapped, (_own_class(cls),), *rest  # pickle cannot find a wrapped class by name


def _engine(model: PreTrainedModel) -> Lookahead | None:
    """The engine of a model. None if the model was unwrapped after this call of generate() began."""
    return vars(model).get("lookahead")


def engine_of(model: PreTrainedModel) -> Lookahead:
    """The engine of a wrapped model. Raises TypeError for a model that is not wrapped."""
    engine = getattr(model, "lookahead", None)
    if not isinstance(engine, Lookahead):
        raise TypeError(f"{type(model).__name__} is not wrapped: call lookahead.wrap(model) first")
    return engine


def _own_method(model: PreTrainedModel, name: str) -> Callable:
    """A method of the model's own class, whether the model is wrapped or not."""
    cls = type(model)
    return getattr(_own_class(cls) if issubclass(cls, LookaheadMixin) else cls, name)


def _own_class(cls: type) -> type:
    """The class that was wrapped. Others may have made subclasses of the wrapped one, as FSDP does."""
    return cls.__mro__[cls.__mro__.index(LookaheadMixin) + 1]


def _wrapped_class(cls: type) -> type[LookaheadMixin]:
    """Subclass of ``cls`` with the same name, so that saving, pipelines and registries still know the model."""
    known: list[type] = type.__subclasses__(cls)
    made = next((one for one in known if one.__bases__ == (LookaheadMixin, cls)), None)
    if made is not None:  # while a model has it: a class of the user's is not kept alive
        return made
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (LookaheadMixin, cls), names)


def _new_wrapped(cls: type) -> "LookaheadMixin":
    """An empty instance for pickle to fill."""
    wrapped = _wrapped_class(cls)
    return wrapped.__new__(wrapped)


def wrap(
    model: PreTrainedModel,
    config: LookaheadConfig | None = None,
    pool: NgramPool | None = None,
    source: GuessSource | Sequence[GuessSource] | None = None,
) -> PreTrainedModel:
    """Make ``model.generate`` decode by lookahead, with the same signature and the same result; returns ``model``.

    Wrapping tests the model with a few tokens. Only the decoding loop changes: weights, gradients and all other uses of
    the model stay the same. The model's own decoding serves calls that lookahead does not support (beam search, prompt
    lookup, encoder-decoders), with one warning. An ``assistant_model`` of ``generate`` is one more source of guesses
    (`DraftModelSource`).
    A wrapped model can be wrapped again: a new ``config``, ``pool`` or ``source`` replaces the old one.
    The base model of a PEFT model is wrapped.

    config: settings.
    pool: the pool to guess from and to learn in, while the model is wrapped; default: a new pool, which starts from the
        model's bigrams if `lookahead tune --bigrams` has stored them.
    source: one `GuessSource`, or several, whose guesses make one tree; default: the pool and its Jacobi window. In a
        list, `PoolSource()` stands for the pool.

    Raises TypeError if ``model`` cannot generate, and for other arguments of a wrong type. Raises ValueError if a
    source cannot guess for this model. Raises UnsupportedModelError, which gives the reason, if lookahead would change
    the model's text. Raises RuntimeError while the model decodes in any thread.
    """
    if hasattr(model, "get_base_model"):
        wrap(model.get_base_model(), config, pool, source)  # type: ignore[operator]  # a method
        return model
    if is_compiled_wrapper(model):
        raise TypeError(
            "lookahead.wrap takes no model that torch.compile(model) returns, whose generate() is that of the model "
            "inside: wrap the model itself, and compile it in place by model.compile()"
        )
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise TypeError(
            f"lookahead.wrap takes a Hugging Face model with generate(), such as AutoModelForCausalLM loads, not "
            f"{type(model).__module__}.{type(model).__qualname__}"
        )
    check_settings(config, pool)
    if isinstance(model, LookaheadMixin):
        before = after = model.lookahead
        if config is not None or source is not None:
            # The pace, the trials and the graphs belong to the old settings.
            config, source = config or before.config, before.source if source is None else source
            after = replace(before, config=config, source=source, pace=None, graphs=None)
        with before.while_idle("wrapped anew"):
            if after is not before:
                _prepare(model, after)
            after.pool = pool if pool is not None else before.pool
        return model
    config = config or LookaheadConfig()
    if pool is None:
        made = new_pool(model, config)
        engine = Lookahead(config, made, source, made, lacks_bigrams=not made)
    else:
        engine = Lookahead(config, pool, source)
    _prepare(model, engine)
    model.__class__ = _wrapped_class(type(model))  # type: ignore[assignment, arg-type]  # of both classes
    return model


def _prepare(model: PreTrainedModel, engine: Lookahead) -> None:
    """Test the model with the engine's settings, and attach the engine to it."""
    for source in engine.sources:
        source.check_model(model)
    if not model.config.is_encoder_decoder and state_of(model).why_plain() is None:
        forget_refusals(model)
        with told_if_long("trying how the model can be decoded"):
            engine.adapter = find_adapter(model, engine.config.cpu_kernels)
            fused_runner(model, engine.adapter, packs=engine.config.pack_weights)  # copies the weights now
    if not engine.config.cpu_kernels:
        packed.forget(model)
    model.lookahead = engine  # type: ignore[assignment]  # neither a Tensor nor a module


def unwrap(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `wrap`, and return the model. A model that is not wrapped stays as it is.

    Raises RuntimeError while the model decodes in any thread.
    """
    if hasattr(model, "get_base_model"):
        unwrap(model.get_base_model())  # type: ignore[operator]  # a method
    if isinstance(model, LookaheadMixin):
        with model.lookahead.while_idle("unwrapped"):
            model.__class__ = _own_class(type(model))
            del model.lookahead
            packed.forget(model)
            forget(model)
    return model
