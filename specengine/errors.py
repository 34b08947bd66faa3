"""The errors that users see; owns no behaviour.

`ConfigError`, `LoadError` and `RequestError` say what the user got wrong (exit code 2 or HTTP 400);
`EngineError` says that the engine itself failed (exit code 1 or HTTP 500). Each message is one sentence
that names the option or field, the value, and what is allowed.
"""


class ConfigError(ValueError):
    """An option has a value that is not allowed, or two options contradict each other."""


class LoadError(ValueError):
    """A model, tokenizer or checkpoint can't be found or read."""


class RequestError(ValueError):
    """A request asks for something that can't be done.

    Args:
        message: one sentence for the user.
        param: the request field at fault, as the client spelled it.
        code: a machine-readable code in OpenAI's style, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(RuntimeError):
    """The engine failed or died; the request may be right."""
