"""An HTTP server around one model, in the form of OpenAI's completions.

    asked.py     what a request asks for, checked
    worker.py    the model, which writes the texts of all requests together
    app.py       who may ask, the routes, the answers
    page.html    the page at /

Only app.py and `drover.tools.serve` need starlette and uvicorn.
"""
