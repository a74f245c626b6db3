"""The media types of bodies."""

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"
HTML_TYPE = "text/html"
FORM_TYPE = "multipart/form-data"
SSE_TYPE = "text/event-stream"
NDJSON_TYPE = "application/x-ndjson"  # a JSON value a line
BYTES_TYPE = "application/octet-stream"
CSV_TYPE = "text/csv"
