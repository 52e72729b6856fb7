"""What the tests of all packages rely on."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background so; tests that interrupt would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
