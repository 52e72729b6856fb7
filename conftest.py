"""What the tests of all packages rely on."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background so; tests that interrupt would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # As under nohup, where a run is not to be stopped by it, and tests of that find nothing.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
