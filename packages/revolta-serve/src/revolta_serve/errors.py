"""The exception tree. Each error knows the HTTP status it becomes.

RevoltaError                        500
├── ConfigError                     400   impossible configuration; ends start-up
├── CheckpointError                 500   a tensor, file or field of the checkpoint is wrong; ends start-up
├── RequestError                    400   the client's mistake
│   ├── ContextLengthError          400   code context_length_exceeded
│   ├── AuthenticationError         401
│   ├── NotFoundError               404   unknown model or route
│   ├── ConflictError               409   not in the state the server is in
│   ├── PayloadTooLargeError        413
│   ├── UnsupportedMediaTypeError   415
│   └── QueueFullError              429
└── EngineError                     500   generation failed
    └── EngineUnavailableError      503   starting, draining or dead
"""


class RevoltaError(Exception):
    """Base of every error of the server."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(RevoltaError):
    """A configuration that cannot work: the message names the field, the value and what would work."""

    status = 400
    type = "config_error"


class CheckpointError(RevoltaError):
    """A checkpoint that cannot be loaded as it is: the message names tensor, file and reason."""

    type = "checkpoint_error"


class RequestError(RevoltaError):
    """The client's mistake; `param` is the path of the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit the model."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No key, or one that is not accepted."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """Unknown route, or a model that is not served."""

    status = 404
    type = "not_found_error"


class ConflictError(RequestError):
    """What is asked for contradicts the state the server is in, or what somebody else asked for."""

    status = 409


class PayloadTooLargeError(RequestError):
    """The body is larger than the server reads."""

    status = 413


class UnsupportedMediaTypeError(RequestError):
    """The body is not application/json."""

    status = 415


class QueueFullError(RequestError):
    """Too many requests are waiting; try again later."""

    status = 429
    type = "rate_limit_error"


class EngineError(RevoltaError):
    """Generation failed for a reason on our side."""


class EngineUnavailableError(EngineError):
    """The engine is starting, draining or dead."""

    status = 503
    type = "service_unavailable"
