"""`python -m staticlm`."""

from staticlm.cli import main

if __name__ == "__main__":
    main()
