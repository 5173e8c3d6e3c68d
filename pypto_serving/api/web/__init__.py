"""Serve the pages for browsers: a playground at / and a dashboard at /dashboard.

The pages are the files in `static/`, served as they are; nothing is built. They load nothing from elsewhere, and their
content security policy forbids it.

- `pages`: serve the files
- `dashboard`: answer what the dashboard shows
"""
