"""Who may ask, from where, how much and how slowly. `docs/security.md` says what is defended against whom."""
