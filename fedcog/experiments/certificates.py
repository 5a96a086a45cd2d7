"""Keys and certificates: who the server is, and which nodes it knows."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedcog.settings import ConfigError

YEAR = datetime.timedelta(days=365)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Somebody to vouch for the server."""
    key = new_key()
    builder = _draft("fedcog federation", key.public_key(), 10 * YEAR)
    builder = builder.issuer_name(_named("fedcog federation"))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_uses(key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(key, _hash()), key


def certificate(
    authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, host: str
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The server's certificate, for its own name and for this machine."""
    key = new_key()
    names = list[x509.GeneralName]()
    for name in dict.fromkeys([host, "localhost", "127.0.0.1"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            try:
                names.append(x509.DNSName(name))
            except ValueError:
                raise ConfigError([f"host '{name}' is neither an address nor a name: give ASCII letters."]) from None
    builder = _draft(host[:64], key.public_key(), YEAR).issuer_name(authority.subject)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_uses(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    vouched = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(vouched, critical=False)
    return builder.sign(authority_key, _hash()), key


def _draft(name: str, key: ec.EllipticCurvePublicKey, life: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(_named(name)).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(now + life)


def _uses(**allowed: bool) -> x509.KeyUsage:
    """What a key may be used for: nothing but what is said."""
    names = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    names += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**(dict.fromkeys(names, False) | allowed))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _hash() -> hashes.SHA384:
    return hashes.SHA384()


def private(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as TLS wants it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as Flower's nodes want it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def openssh_public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key to it."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as TLS wants it."""
    return certificate.public_bytes(Encoding.PEM)
