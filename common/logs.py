"""Log set-up of every process: one line for each event, `key=value` fields, to standard error."""

import logging


class _FieldsFormatter(logging.Formatter):
    """Append what a record carries in `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = super().format(record)
        fields = record.__dict__.get("fields")
        return line if not fields else f"{line} {' '.join(f'{k}={v}' for k, v in fields.items())}"


def set_up(process: str, level: str = "INFO") -> None:
    """Send this process's log to standard error, each line marked with `process`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_FieldsFormatter(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def log(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Write one event with its fields; always give request_id and worker_id where they exist."""
    logger.log(level, message, extra={"fields": fields})
