//! Principals: names of callers, from a token, a JWT or a client certificate.

use std::fmt::{self, Display};
use std::sync::Arc;

use helix_tls::CertificateNames;

use super::jwt::JwtLogin;
use crate::log::{TokenRecord, is_principal_name};

/// Name of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal(Arc<str>);

impl Principal {
    /// Returns the principal of a token.
    pub(crate) fn of_token(token: &TokenRecord) -> Self {
        Self(token.principal.as_str().into())
    }

    /// Returns the principal of a verified JWT.
    pub(crate) fn of_jwt(login: &JwtLogin) -> Self {
        Self(login.principal().clone())
    }

    /// Returns the principal of a verified client certificate.
    ///
    /// The first kind of names that the certificate has decides: URI, then DNS, then the common
    /// name. It must have exactly one name of that kind, so that the order of names in a
    /// certificate never decides about rights. A DNS name with a wildcard names no caller.
    ///
    /// # Errors
    /// A text that says which name is missing, ambiguous or invalid.
    pub fn from_certificate(names: &CertificateNames) -> Result<Self, String> {
        let CertificateNames { uris, dns, common_names } = names;
        let (kind, name) = match (uris.as_slice(), dns.as_slice(), common_names.as_slice()) {
            ([uri], _, _) => ("URI", uri),
            ([], [dns], _) => ("DNS name", dns),
            ([], [], [name]) => ("common name", name),
            ([], [], []) => {
                return Err("the client certificate has no URI, DNS name or common name".to_owned());
            }
            ([], [], several) => return Err(ambiguous("common names", several)),
            ([], several, _) => return Err(ambiguous("DNS names", several)),
            (several, ..) => return Err(ambiguous("URIs", several)),
        };
        if !is_principal_name(name) || kind == "DNS name" && name.contains('*') {
            return Err(format!(
                "the {kind} {name:?} of the client certificate names no principal"
            ));
        }
        Ok(Self(name.as_str().into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn ambiguous(kind: &str, names: &[String]) -> String {
    format!("the client certificate has {} {kind}, so its principal is ambiguous", names.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn principal(uris: &[&str], dns: &[&str], common: &[&str]) -> Result<String, String> {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let names =
            CertificateNames { uris: owned(uris), dns: owned(dns), common_names: owned(common) };
        Principal::from_certificate(&names).map(|it| it.to_string())
    }

    #[test]
    fn the_first_kind_of_names_of_a_certificate_decides() {
        let uri = "spiffe://example.org/orders";
        assert_eq!(principal(&[uri], &["a.example.org"], &["x"]).unwrap(), uri);
        assert_eq!(principal(&[], &["a.example.org"], &["x"]).unwrap(), "a.example.org");
        assert_eq!(principal(&[], &[], &["alice"]).unwrap(), "alice");
        assert!(principal(&[], &[], &[]).unwrap_err().contains("no URI"));
    }

    #[test]
    fn an_ambiguous_or_invalid_certificate_has_no_principal() {
        assert!(principal(&[], &[], &["a", "b"]).unwrap_err().contains("2 common names"));
        assert!(principal(&["a:1", "a:2"], &[], &["x"]).unwrap_err().contains("2 URIs"));
        assert!(principal(&[], &["a", "b"], &["x"]).unwrap_err().contains("2 DNS names"));
        assert!(principal(&[], &["*.example.org"], &[]).is_err());
        assert!(principal(&[], &[], &["Alice Smith"]).is_err());
        assert!(principal(&[], &[], &[""]).is_err());
        assert!(principal(&[], &[], &[&"x".repeat(256)]).is_err());
        assert!(principal(&[&"é".repeat(3)], &["a"], &[]).is_err(), "no fall back to the DNS name");
    }
}
