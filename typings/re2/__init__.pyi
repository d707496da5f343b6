"""What this project calls of google-re2, which ships no types."""

class error(Exception): ...

class Options:
    max_mem: int
    log_errors: bool
    never_capture: bool
    def __init__(self) -> None: ...

class Pattern:
    def fullmatch(self, text: str) -> object | None: ...

def compile(pattern: str, options: Options | None = ...) -> Pattern: ...
