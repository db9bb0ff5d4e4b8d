"""An HTTP server around one model, in the form of OpenAI's completions.

    asked.py     parses and checks a request
    worker.py    the model, which generates the texts of all requests in one batch
    app.py       access, routes, answers
    page.html    the page at /

Only app.py and `drover.tools.serve` need starlette and uvicorn.
"""
