"""Options of the shortest run of ``sdbench e2e`` that has an answer and a rate."""

SHORT = (
    "--calibration-examples=2",
    "--validation-examples=2",
    "--max-tokens=6",
    "--equal-tokens=5",
    "--warmup-tokens=0",
    "--rate-repeats=1",
)
