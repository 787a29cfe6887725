# make            set up everything that is missing: system packages (as root), .venv, Python packages, native code
# make demo       then fine-tune a real model from NVMe          (ARGS="steps=20" and the like are passed on)
# make test       then run the whole test suite                  (ARGS="-k data -x" and the like are passed on)
# make lint       ruff, mypy, and the site, strictly
# make docs       the generated pages anew, and the site into build/site
# make sanitize   the tests of the native code under AddressSanitizer and UBSan, its drivers under ThreadSanitizer too
# make crash     N=300: a training that is killed so often, at random moments of every phase
# make soak      MINUTES=30: the tests of exactness on the sim device, with random delays, seed after seed
# make fuzz      MINUTES=10: damaged and hostile files for each parser
# make combine   MINUTES=10: random options and actions together, with crashes and I/O errors, compared with the oracle
# make bounded   STEPS=1000: nothing grows in a long run
# make clean      remove what was built; make distclean: .venv and ./work too

PYTHON ?= python3
BIN := .venv/bin
export PYTHON

.PHONY: setup demo test lint docs sanitize soak crash fuzz combine bounded clean distclean
setup:
	@tools/setup

demo: setup
	@$(BIN)/zinf demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

docs: setup
	$(BIN)/python tools/docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "docs: build/site/index.html"

sanitize: setup
	@tools/sanitize $(ARGS)

crash: setup
	@$(BIN)/python tests/crash/storm.py --kills $(or $(N),300) $(ARGS)

soak: setup
	@$(BIN)/python tests/soak.py $(or $(MINUTES),30) $(ARGS)

fuzz: setup
	@$(BIN)/python tests/fuzz.py $(or $(TARGET),all) $(or $(MINUTES),10) $(ARGS)

combine: setup
	@$(BIN)/python tests/training_machine.py $(or $(MINUTES),10) $(ARGS)

bounded: setup
	ZINF_BOUNDED_STEPS=$(or $(STEPS),1000) $(BIN)/python -m pytest -s tests/test_bounded.py $(ARGS)

clean:
	rm -rf build dist *.egg-info zinf/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zinf tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv work
