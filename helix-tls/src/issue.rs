//! Makes certificates: a CA, certificates of nodes and of clients. ECDSA P-256.

use std::net::IpAddr;
use std::time::Duration;

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber, date_time_ymd,
};
use rustls::crypto::SecureRandom;

use crate::certificate::CertificateNames;
use crate::identity::{NodeIdentity, check_cluster_name};
use crate::{pem, provider};

/// Certificates are valid from this long before now, for clocks that are behind.
const BACKDATED: Duration = Duration::from_secs(3600);

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Longest validity: a hundred years.
const DAYS_MAX: u32 = 36_500;

/// URI of a cluster's CA, before the name of the cluster.
const CLUSTER_URI: &str = "helix://cluster/";

/// A certificate and its private key, as PEM.
pub struct IssuedPair {
    /// The certificate.
    pub certificate: String,
    /// The key, PKCS #8. Secret.
    pub key: String,
}

impl std::fmt::Debug for IssuedPair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IssuedPair (hidden)")
    }
}

/// A CA that signs certificates.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    cluster: String,
}

impl std::fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CertificateAuthority of cluster {:?}", self.cluster)
    }
}

impl CertificateAuthority {
    /// Makes a CA for a cluster, valid for this many days.
    ///
    /// # Errors
    /// The name of the cluster or the number of days is not valid.
    pub fn create(cluster: &str, days: u32) -> Result<IssuedPair, String> {
        check_cluster_name(cluster)?;
        let mut params = params("", days)?;
        // Each CA has a name of its own: verification looks for the CA by its name.
        let serial = params.serial_number.as_ref().map(SerialNumber::to_string).unwrap_or_default();
        let name = format!("Helix CA of {cluster}, {}", serial.get(..11).unwrap_or_default());
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names = vec![uri(&format!("{CLUSTER_URI}{cluster}"))?];
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?;
        Ok(IssuedPair { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// Opens a CA from its certificate and its key.
    ///
    /// # Errors
    /// They are not PEM, or not those of a CA that [`Self::create`] has made.
    pub fn open(certificate: &str, key: &str) -> Result<Self, String> {
        let wrong = |what: String| format!("the CA's certificate: {what}");
        let blocks = pem::blocks(certificate.as_bytes()).map_err(wrong)?;
        let [block] = blocks.as_slice() else {
            let count = blocks.len();
            return Err(wrong(format!("has {count} blocks of PEM; it must be one certificate")));
        };
        let (_, der) = block.decode().map_err(wrong)?;
        let der = rustls::pki_types::CertificateDer::from(der);
        let names = CertificateNames::of(&der)?;
        let mut clusters = names.uris.iter().filter_map(|uri| uri.strip_prefix(CLUSTER_URI));
        let cluster = clusters.next().ok_or("the CA names no cluster; make one: helix cert ca")?;
        check_cluster_name(cluster)?;
        // The parser's error may have contents of the file.
        let key = KeyPair::from_pem(key).map_err(|_| "the CA's key is not valid".to_owned())?;
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(failed)?;
        Ok(Self { issuer, cluster: cluster.to_owned() })
    }

    /// Returns the name of the cluster.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Makes the certificate of a node, for the ports of clients, nodes and the admin port.
    ///
    /// `hosts` are the DNS names and IP addresses that clients dial.
    ///
    /// # Errors
    /// A host or the number of days is not valid.
    pub fn node(&self, node_id: u64, hosts: &[String], days: u32) -> Result<IssuedPair, String> {
        let identity = NodeIdentity { cluster: self.cluster.clone(), node_id };
        let mut params = params(&format!("node {node_id} of {}", self.cluster), days)?;
        params.subject_alt_names = vec![uri(&identity.to_string())?];
        for host in hosts {
            params.subject_alt_names.push(match host.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(dns_name(host)?),
            });
        }
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    /// Makes the certificate of a client, whose common name is `name`.
    ///
    /// # Errors
    /// The name or the number of days is not valid.
    pub fn client(&self, name: &str, days: u32) -> Result<IssuedPair, String> {
        let is_name = (1..=64).contains(&name.len()) && !name.chars().any(char::is_control);
        if !is_name {
            return Err("the name of a client has 1 to 64 bytes".to_owned());
        }
        let common_names = vec![name.to_owned()];
        self.client_with_names(&CertificateNames { common_names, ..Default::default() }, days)
    }

    /// Makes the certificate of a client with these names, of which at most one is a common name.
    ///
    /// # Errors
    /// A name or the number of days is not valid.
    pub fn client_with_names(
        &self,
        names: &CertificateNames,
        days: u32,
    ) -> Result<IssuedPair, String> {
        let mut params = params(names.common_names.first().map_or("", String::as_str), days)?;
        if names.common_names.is_empty() {
            params.distinguished_name = rcgen::DistinguishedName::new();
        }
        for name in &names.uris {
            params.subject_alt_names.push(uri(name)?);
        }
        for name in &names.dns {
            params.subject_alt_names.push(SanType::DnsName(dns_name(name)?));
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params)
    }

    fn sign(&self, mut params: CertificateParams) -> Result<IssuedPair, String> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(IssuedPair { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn params(common_name: &str, days: u32) -> Result<CertificateParams, String> {
    if days > DAYS_MAX {
        return Err(format!("{days} days are too many; choose at most {DAYS_MAX}"));
    }
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = u64::try_from(crate::unix_now()).unwrap_or_default();
    let now = date_time_ymd(1970, 1, 1) + Duration::from_secs(now);
    params.not_before = now - BACKDATED;
    params.not_after = match days {
        // For tests: expired.
        0 => now - BACKDATED / 2,
        days => now + DAY * days,
    };
    let mut serial = [0; 16];
    let random: &dyn SecureRandom = provider().secure_random;
    random.fill(&mut serial).map_err(|_| "there is no randomness".to_owned())?;
    // Positive, so that it has this length in DER.
    serial[0] = serial[0] & 0x7f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    Ok(params)
}

fn uri(text: &str) -> Result<SanType, String> {
    Ok(SanType::URI(Ia5String::try_from(text).map_err(failed)?))
}

fn dns_name(host: &str) -> Result<Ia5String, String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._*".contains(&byte);
    if host.is_empty() || host.len() > 253 || !host.bytes().all(is_allowed) {
        return Err(format!("{host:?} is neither a DNS name nor an IP address"));
    }
    Ia5String::try_from(host).map_err(failed)
}

fn failed(error: rcgen::Error) -> String {
    format!("cannot make a certificate: {error}")
}
