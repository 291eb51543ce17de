"""The paper's statements on models as running code: what each one is and where it is tested, `docs/theory.md` says."""
