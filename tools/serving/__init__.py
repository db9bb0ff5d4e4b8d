"""An HTTP server around one model, in the form of OpenAI's completions.

    asked.py     what a request asks for, checked
    logprobs.py  log-probabilities of tokens in OpenAI's form
    worker.py    the thread that runs the model, for all requests that wait together
    answers.py   the JSON of answers, chunks and errors
    app.py       the routes
    page.html    the page at /

Only app.py and `tools.serve` need starlette and uvicorn.
"""

LOCAL = ("127.0.0.1", "localhost", "::1")
"""By which this machine calls itself."""
