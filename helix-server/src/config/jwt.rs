//! Settings of JWTs, and the file with the keys of their issuer.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use super::check::ConfigProblems;
use super::{AuthSetting, ServerConfig};
use crate::access::jwt::{JWKS_BYTES_MAX, JwtRules, JwtVerifier};

/// Bytes of the settings that are compared with claims.
const CLAIM_BYTES_MAX: usize = 256;

/// Bytes of the beginning of the principals.
const PREFIX_BYTES_MAX: usize = 64;

/// A file with a JWKS.
#[derive(Debug, Clone)]
pub struct JwksFile(PathBuf);

impl JwksFile {
    /// Returns the contents of the file, which the parser refuses if they are too large.
    ///
    /// # Errors
    /// The reason, if the file cannot be read.
    // Not logs, whose files only helix-wal accesses.
    #[expect(clippy::disallowed_methods, reason = "files of keys belong to no log")]
    pub fn read(&self) -> Result<Vec<u8>, String> {
        let cannot = |error: std::io::Error| {
            format!("{} cannot be read: {error}; check path and permissions", self.0.display())
        };
        let file = std::fs::File::open(&self.0).map_err(cannot)?;
        let mut json = Vec::new();
        file.take(JWKS_BYTES_MAX as u64 + 1).read_to_end(&mut json).map_err(cannot)?;
        Ok(json)
    }
}

impl ServerConfig {
    /// Returns the file with the keys of the issuer of JWTs; `None` if the node accepts none.
    pub fn jwks_file(&self) -> Option<JwksFile> {
        self.jwt_jwks.clone().map(JwksFile)
    }

    /// Reads the keys and returns the verifier of JWTs; `None` if the node accepts none.
    ///
    /// # Errors
    /// The reason, if the file cannot be read or is not valid.
    pub fn open_jwt(&self) -> Result<Option<Arc<JwtVerifier>>, String> {
        let Some(file) = self.jwks_file() else { return Ok(None) };
        let rules = JwtRules {
            issuer: self.jwt_issuer.clone().unwrap_or_default(),
            audience: self.jwt_audience.clone().unwrap_or_default(),
            principal_claim: self.jwt_principal_claim.clone(),
            principal_prefix: self.jwt_principal_prefix.clone(),
        };
        let verifier = JwtVerifier::new(rules, &file.read()?);
        let verifier = verifier.map_err(|error| format!("{} {error}", file.0.display()))?;
        Ok(Some(Arc::new(verifier)))
    }

    pub(super) fn check_jwt(&self, problems: &mut ConfigProblems) {
        let claims = [("jwt-issuer", &self.jwt_issuer), ("jwt-audience", &self.jwt_audience)];
        let Some(path) = &self.jwt_jwks else {
            for (flag, value) in claims {
                let what = "has no effect without --jwt-jwks";
                let value = value.as_deref();
                problems.expect(value.is_none(), flag, &value.unwrap_or_default(), what);
            }
            return;
        };
        let shown = path.display();
        let what = "callers are not checked; set --auth required or optional";
        problems.expect(self.auth != AuthSetting::Off, "jwt-jwks", &shown, what);
        for (flag, value) in claims {
            let value = value.as_deref().unwrap_or_default();
            // Without them each JWT of the issuer for any other service would be accepted.
            let is_set = (1..=CLAIM_BYTES_MAX).contains(&value.len());
            let what = "JWTs need an issuer and an audience of 1 to 256 bytes; set both";
            problems.expect(is_set, flag, &value, what);
        }
        let claim = self.jwt_principal_claim.as_str();
        let is_named = (1..=CLAIM_BYTES_MAX).contains(&claim.len());
        let what = "name a claim, in 1 to 256 bytes";
        problems.expect(is_named, "jwt-principal-claim", &claim, what);
        let prefix = self.jwt_principal_prefix.as_str();
        let is_prefix = prefix.len() <= PREFIX_BYTES_MAX
            && prefix.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'*');
        let what = "choose up to 64 printable ASCII characters without spaces and `*`";
        problems.expect(is_prefix, "jwt-principal-prefix", &prefix, what);
        if let Err(what) = self.open_jwt() {
            problems.expect(false, "jwt-jwks", &shown, &what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;

    fn problems(config: &ServerConfig) -> Vec<String> {
        config.validate().err().map_or(Vec::new(), |ConfigError { problems }| problems)
    }

    #[test]
    fn settings_of_jwts_need_each_other_and_a_valid_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("jwks.json");
        #[allow(clippy::disallowed_methods)]
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        let document: serde_json::Value =
            serde_json::from_str(include_str!("../access/jwt/vectors.json")).unwrap();
        write(&document["jwks"].to_string());
        let config = ServerConfig {
            auth: AuthSetting::Required,
            jwt_jwks: Some(path.clone()),
            jwt_issuer: Some("https://id.example".to_owned()),
            jwt_audience: Some("helix".to_owned()),
            ..Default::default()
        };
        assert_eq!(problems(&config), [""; 0]);
        for (wrong, what) in [
            (ServerConfig { auth: AuthSetting::Off, ..config.clone() }, "callers are not checked"),
            (ServerConfig { jwt_jwks: None, ..config.clone() }, "--jwt-issuer https://id.example"),
            (ServerConfig { jwt_issuer: None, ..config.clone() }, "--jwt-issuer : JWTs need"),
            (
                ServerConfig { jwt_audience: Some(String::new()), ..config.clone() },
                "--jwt-audience : JWTs need",
            ),
            (ServerConfig { jwt_principal_claim: String::new(), ..config.clone() }, "name a claim"),
            (
                ServerConfig { jwt_principal_prefix: "a b".to_owned(), ..config.clone() },
                "without spaces",
            ),
        ] {
            let said = problems(&wrong);
            assert!(said.iter().any(|said| said.contains(what)), "{what}: {said:?}");
        }
        write("{}");
        assert!(problems(&config)[0].contains("is not a JWKS"), "{:?}", problems(&config));
        write(&" ".repeat(JWKS_BYTES_MAX + 10));
        assert!(problems(&config)[0].contains("the limit is"), "{:?}", problems(&config));
        let missing = ServerConfig { jwt_jwks: Some("/nowhere/jwks".into()), ..config };
        assert!(problems(&missing)[0].contains("cannot be read"), "{:?}", problems(&missing));
    }
}
