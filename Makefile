# Two commands: `make demo` trains a small model in about two minutes, `make test` checks everything.
# Each makes .venv first if it is missing (about 8 GB and three minutes on Linux x86-64).
PYTHON ?= python3
READY := .venv/.ready

.PHONY: demo test notebooks lint setup clean

demo: $(READY)
	@.venv/bin/nanogpt-tpu demo $(ARGS)

test: $(READY)
	.venv/bin/python -m pytest $(ARGS)

notebooks: $(READY)
	.venv/bin/pip install --quiet jupyterlab ipywidgets
	.venv/bin/jupyter lab notebooks

lint: $(READY)
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

setup: $(READY)

$(READY): pyproject.toml kaggle/image-constraints.txt scripts/setup_env.py
	@$(PYTHON) scripts/setup_env.py

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache
