"""The conformance kit of the `hf_static` contract; `docs/contract/hf-static-v1.md` is its text."""
