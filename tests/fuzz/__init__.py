"""Code that reads what others send, fed with anything: ``python -m fuzz --help``; a few seconds of it in the tests."""
