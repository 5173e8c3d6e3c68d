"""Answer the requests of a file, one line of JSON each.

- `endpoints`, `batches`: the endpoints; run the batches of a server
- `store`: keep files and batches in a folder
- `schemas`, `answers`, `multipart`: read bodies and forms; describe answers
- `running`: answer all requests of a file that are not answered yet
- `lines`: read requests, write answers
- `direct`: call the endpoints in this process
"""
