"""Keys and certificates: TLS for the server, and key pairs for the nodes."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedcog.core.settings import ConfigError

SERVER_LIFETIME = datetime.timedelta(days=365)
AUTHORITY_LIFETIME = 10 * SERVER_LIFETIME
CLOCK_TOLERANCE = datetime.timedelta(minutes=5)
"""Certificates are valid from this long before now, because clocks differ."""
AUTHORITY_NAME = "fedcog federation"
MAX_COMMON_NAME_LENGTH = 64

KEY_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Generate a private key."""
    return ec.generate_private_key(ec.SECP384R1())


def new_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Generate a certificate authority: its certificate and private key."""
    key = new_key()
    builder = _certificate_builder(AUTHORITY_NAME, key.public_key(), AUTHORITY_LIFETIME)
    builder = builder.issuer_name(_x509_name(AUTHORITY_NAME))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(key, hashes.SHA384()), key


def new_server_certificate(
    authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, host: str
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Generate the server's certificate, valid for its host name and for localhost.

    Args:
        authority: Certificate of the authority that signs it.
        authority_key: Private key of the authority.
        host: Name or address by which nodes reach the server.

    Returns:
        The certificate and its private key.

    Raises:
        ConfigError: The host is neither an address nor an ASCII name.
    """
    key = new_key()
    names = [_subject_name(name) for name in dict.fromkeys([host, "localhost", "127.0.0.1"])]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    common_name = host[:MAX_COMMON_NAME_LENGTH]
    builder = _certificate_builder(common_name, key.public_key(), SERVER_LIFETIME)
    builder = builder.issuer_name(authority.subject)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_key_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(issuer, critical=False)
    return builder.sign(authority_key, hashes.SHA384()), key


def _subject_name(host: str) -> x509.GeneralName:
    """An IP address or a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(
            [f"host '{host}' is neither an address nor a name: use ASCII letters."]
        ) from None


def _certificate_builder(
    name: str, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(_x509_name(name)).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.not_valid_before(now - CLOCK_TOLERANCE).not_valid_after(now + lifetime)


def _key_usage(**allowed: bool) -> x509.KeyUsage:
    """Allow the given uses of a key, and forbid all others."""
    return x509.KeyUsage(**(dict.fromkeys(KEY_USAGES, False) | allowed))


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def pem_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key for TLS."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def openssh_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key for a Flower node."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def openssh_public_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode the public key of a Flower node."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def pem_certificate(certificate: x509.Certificate) -> bytes:
    """Encode a certificate for TLS."""
    return certificate.public_bytes(Encoding.PEM)
