"""`oasis top`: watch a running server by its Prometheus metrics.

    scrape.py     one reading of /metrics, and why there is none
    frame.py      what the view shows, worked out from the readings so far
    render.py     a frame as text for a terminal of any width
    command.py    the loop

Nothing here imports torch or SGLang: the server may be anywhere.
"""
