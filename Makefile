# PYTHON=/path/to/python3.12 chooses the interpreter that .venv is made with.
.PHONY: demo test

# Build an artifact with no GPU, inspect it, run it.
demo:
	@.ci/demo

# Everything that CI checks.
test:
	@.ci/run
