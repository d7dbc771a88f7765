"""TLS between agents: each shows a certificate of one authority."""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one agent. The certificate names the host under which others call it."""

    certificate: Path
    key: Path
    authority: Path

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # Connections are kept and not resumed; a ticket would look like a late answer.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context
