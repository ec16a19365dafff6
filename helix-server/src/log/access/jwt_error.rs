//! Reasons why a JWT is refused (RFC 7519). `jwt/` decides them.

/// Reason why a JWT is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JwtError {
    #[error(
        "the token is a JWT, and this node accepts none; send a token of this cluster, or set \
         --jwt-jwks on every node"
    )]
    Off,
    #[error(
        "the JWT has {bytes} bytes, the limit is {max}; let its issuer put fewer claims into it"
    )]
    TooLarge { bytes: usize, max: usize },
    #[error("the JWT is malformed: {0}; send it as its issuer made it")]
    Malformed(&'static str),
    #[error(
        "the algorithm {name} of the JWT is not that of a key in this node's JWKS; RS256, ES256 \
         and EdDSA are accepted"
    )]
    Algorithm { name: String },
    #[error("{key} of the JWT is not in this node's JWKS; get another JWT, or update the JWKS")]
    UnknownKey { key: String },
    #[error("the signature of the JWT is not that of its key; send it as its issuer made it")]
    Signature,
    #[error("the JWT is of another issuer than {expected:?}, which this node accepts")]
    Issuer { expected: String },
    #[error("the JWT is for another audience than {expected:?}, which this node accepts")]
    Audience { expected: String },
    #[error("the JWT expired {ago_s} s ago by this node's clock; get another one of its issuer")]
    Expired { ago_s: u64 },
    #[error("the JWT is valid in {in_s} s only, by this node's clock; check the clocks")]
    Early { in_s: u64 },
    #[error(
        "the claim {claim:?} of the JWT names no principal; it must be a string of printable \
         ASCII characters without spaces, not too long"
    )]
    Principal { claim: String },
}

impl JwtError {
    /// Returns the reason's name for metrics and the audit log.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Off => "jwt_off",
            Self::TooLarge { .. } => "jwt_too_large",
            Self::Malformed(_) => "jwt_malformed",
            Self::Algorithm { .. } => "jwt_algorithm",
            Self::UnknownKey { .. } => "jwt_unknown_key",
            Self::Signature => "jwt_signature",
            Self::Issuer { .. } => "jwt_issuer",
            Self::Audience { .. } => "jwt_audience",
            Self::Expired { .. } => "jwt_expired",
            Self::Early { .. } => "jwt_early",
            Self::Principal { .. } => "jwt_principal",
        }
    }
}
