"""Any training job, recorded from outside, compared with another: `hp verify -- A --against -- B`."""
