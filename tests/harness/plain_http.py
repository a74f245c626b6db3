"""What official clients of coordinators without TLS are made with."""

import ssl

# They read the system's certificates otherwise, which takes longer than most tests.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
