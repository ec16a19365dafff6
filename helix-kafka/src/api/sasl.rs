//! SaslHandshake and SaslAuthenticate: PLAIN with a token as password, OAUTHBEARER with a JWT.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use helix_client::proto::log::v1::CallerSource;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{
    ApiKey, SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest,
    SaslHandshakeResponse,
};

use crate::connection::ConnectionEnd;
use crate::context::text;
use crate::dispatch::decode;
use crate::frame::{RequestHeader, ResponseFrame, encode_response};
use crate::state::GatewayState;
use crate::upstream::Upstream;

/// Mechanisms that clients may choose.
const MECHANISMS: [&str; 2] = ["PLAIN", "OAUTHBEARER"];

/// Separator of the parts of an OAUTHBEARER message (RFC 7628).
const SEPARATOR: char = '\u{1}';

/// Returns true for the requests of the login.
pub(crate) fn is_login_api(key: ApiKey) -> bool {
    matches!(key, ApiKey::SaslHandshake | ApiKey::SaslAuthenticate)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mechanism {
    Plain,
    OauthBearer,
}

/// Login of a connection.
#[derive(Debug)]
pub(crate) struct Login {
    /// The cluster with the credentials of the client, once it has any.
    upstream: Option<Arc<Upstream>>,
    mechanism: Option<Mechanism>,
    /// The client sends the token without a header of a request.
    is_bare: bool,
}

impl Login {
    pub(crate) fn new(state: &GatewayState) -> Self {
        let upstream = (!state.rules.requires_sasl).then(|| state.upstream.clone());
        Self { upstream, mechanism: None, is_bare: false }
    }

    /// Returns the cluster with the credentials of the connection.
    pub(crate) fn upstream(&self) -> Option<&Arc<Upstream>> {
        self.upstream.as_ref()
    }

    /// Returns true if the next frame is a token without a header.
    pub(crate) fn expects_token(&self) -> bool {
        self.is_bare
    }

    /// Answers a token without a header: an empty frame.
    ///
    /// # Errors
    /// The credentials are refused. Kafka's protocol has no answer for it here.
    pub(crate) async fn on_token(
        &mut self,
        state: &GatewayState,
        token: Bytes,
    ) -> Result<ResponseFrame, ConnectionEnd> {
        self.is_bare = false;
        self.authenticate(state, &token).await.map_err(ConnectionEnd::Login)?;
        let mut frame = BytesMut::with_capacity(4);
        frame.put_i32(0);
        Ok(ResponseFrame { chunks: vec![frame.freeze()] })
    }

    /// Answers a request of the login.
    ///
    /// # Errors
    /// The reason to close the connection.
    pub(crate) async fn answer(
        &mut self,
        state: &GatewayState,
        header: &RequestHeader,
        body: Bytes,
    ) -> Result<ResponseFrame, ConnectionEnd> {
        let frame = match header.api.key {
            ApiKey::SaslHandshake => {
                let request: SaslHandshakeRequest = decode(body, header.version)?;
                let code = self.choose(state, &request.mechanism);
                // After version 0 the token comes without a header.
                self.is_bare = code.is_none() && header.version == 0;
                let mechanisms = MECHANISMS.map(text).to_vec();
                let response = SaslHandshakeResponse::default()
                    .with_error_code(code.map_or(0, |code| code.code()))
                    .with_mechanisms(mechanisms);
                state.metrics.on_response(header.api.key, &response);
                encode_response(header, &response)
            }
            _ => {
                let request: SaslAuthenticateRequest = decode(body, header.version)?;
                let response = match self.authenticate(state, &request.auth_bytes).await {
                    Ok(()) => SaslAuthenticateResponse::default(),
                    Err(what) => {
                        tracing::warn!(what, "refused a login");
                        state.metrics.failed_logins.add(1);
                        // A wrong secret cannot be tried at the speed of the network.
                        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                        SaslAuthenticateResponse::default()
                            .with_error_code(ResponseError::SaslAuthenticationFailed.code())
                            .with_error_message(Some(text(what)))
                    }
                };
                state.metrics.on_response(header.api.key, &response);
                encode_response(header, &response)
            }
        };
        frame.map_err(ConnectionEnd::Message)
    }

    fn choose(&mut self, state: &GatewayState, mechanism: &str) -> Option<ResponseError> {
        if !state.rules.requires_sasl {
            return Some(ResponseError::IllegalSaslState);
        }
        self.mechanism = match mechanism {
            "PLAIN" => Some(Mechanism::Plain),
            "OAUTHBEARER" => Some(Mechanism::OauthBearer),
            _ => None,
        };
        self.mechanism.is_none().then_some(ResponseError::UnsupportedSaslMechanism)
    }

    /// Checks credentials at the cluster, and uses them from here on.
    async fn authenticate(&mut self, state: &GatewayState, message: &[u8]) -> Result<(), String> {
        let Some(mechanism) = self.mechanism else {
            return Err("SaslHandshake must come first".to_owned());
        };
        let message =
            std::str::from_utf8(message).map_err(|_| "the credentials are not UTF-8".to_owned())?;
        let (user, token) = match mechanism {
            Mechanism::Plain => plain_credentials(message)?,
            Mechanism::OauthBearer => ("", bearer_token(message)?),
        };
        let upstream = state.principals.get(token).map_err(|error| error.message.clone())?;
        let who = upstream.client().admin().who_am_i().await;
        let who =
            who.map_err(|error| format!("the cluster refuses the token: {}", error.message))?;
        if !matches!(who.source(), CallerSource::Token | CallerSource::Jwt) {
            return Err("the cluster does not check tokens; start its nodes with --auth".to_owned());
        }
        if !user.is_empty() && user != who.principal {
            return Err(format!("the token is not one of user {user:?}"));
        }
        self.upstream = Some(upstream);
        Ok(())
    }
}

/// Returns the user and the password of PLAIN (RFC 4616). A user may act only as itself.
fn plain_credentials(message: &str) -> Result<(&str, &str), String> {
    let mut parts = message.split('\0');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(acts_as), Some(user), Some(password), None) if !password.is_empty() => {
            if !acts_as.is_empty() && acts_as != user {
                return Err(format!("user {user:?} cannot act as {acts_as:?}"));
            }
            Ok((user, password))
        }
        _ => Err("PLAIN needs a user, and a token as password".to_owned()),
    }
}

/// Returns the token of an OAUTHBEARER message (RFC 7628).
fn bearer_token(message: &str) -> Result<&str, String> {
    let auth = message.split(SEPARATOR).find_map(|part| part.strip_prefix("auth="));
    let token = auth.and_then(|auth| {
        let (scheme, token) = auth.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
    });
    token
        .filter(|token| !token.is_empty())
        .ok_or_else(|| "OAUTHBEARER needs a bearer token".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_credentials() {
        assert_eq!(plain_credentials("\0app\0secret"), Ok(("app", "secret")));
        assert_eq!(plain_credentials("app\0app\0secret"), Ok(("app", "secret")));
        for wrong in ["", "app", "\0app", "\0app\0", "x\0app\0secret", "\0a\0b\0c"] {
            assert!(plain_credentials(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(bearer_token("n,,\u{1}auth=Bearer abc\u{1}\u{1}"), Ok("abc"));
        for wrong in ["", "n,,\u{1}auth=Basic abc\u{1}\u{1}", "n,,\u{1}auth=Bearer \u{1}\u{1}"] {
            assert!(bearer_token(wrong).is_err(), "{wrong:?}");
        }
    }
}
