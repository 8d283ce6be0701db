"""Certificates for tests: an authority, and what it certifies."""

import asyncio
import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common.config_doors import TlsConfig

_LIMIT_S = 10.0


class Certified(NamedTuple):
    """A certificate in files."""

    cert: Path
    key: Path
    serial: int


class Authority:
    """An authority of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        mine = self._builder(self._name, self._key.public_key())
        mine = mine.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file.write_bytes(mine.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certify(self, name: str = "server") -> Certified:
        """Write a certificate for loopback and the cluster's own name, in place of what was there."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.DNSName("localhost"),
            x509.DNSName("baton.internal"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key.public_key()).add_extension(x509.SubjectAlternativeName(names), False)
        certificate = made.sign(self._key, hashes.SHA256())
        files = Certified(self._folder / f"{name}.crt", self._folder / f"{name}.key", certificate.serial_number)
        files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def config(self, certified: Certified, is_mutual: bool = True) -> TlsConfig:
        """Return the settings of a process with this certificate."""
        return TlsConfig(cert_file=certified.cert, key_file=certified.key, ca_file=self.file if is_mutual else None)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            self._name,
            subject,
            key,
            x509.random_serial_number(),
            now - datetime.timedelta(hours=1),
            now + datetime.timedelta(days=1),
        )


async def serial_shown(port: int) -> int:
    """Connect and return the serial number of the certificate that is shown."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(_LIMIT_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return x509.load_der_x509_certificate(shown).serial_number
