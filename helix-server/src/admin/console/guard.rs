//! Checks of a request's headers, before anything else: the name that the browser calls the console
//! by, and the page that sends a change. They keep pages of other sites out, also those whose name
//! resolves to this machine (DNS rebinding). Pure.

use std::net::{IpAddr, SocketAddr};

use hyper::header::{HOST, HeaderMap, ORIGIN};

use crate::quote::quote;

/// Returns the host of a request, with its port.
///
/// # Errors
/// The host is not one of the console: a loopback name, the listener's address, the address that
/// the connection came in at, or one of `names`.
pub(super) fn check_host<'a>(
    headers: &'a HeaderMap,
    names: &[String],
    addresses: &[IpAddr],
) -> Result<&'a str, String> {
    let mut hosts = headers.get_all(HOST).iter();
    let (host, other) = (hosts.next(), hosts.next());
    let host = host.filter(|_| other.is_none()).and_then(|host| host.to_str().ok());
    let host = host.ok_or("the request must have one Host header")?;
    let name = without_port(host);
    let address: Option<IpAddr> = name.trim_matches(['[', ']']).parse().ok();
    let is_known = match address {
        Some(address) => address.is_loopback() || addresses.contains(&address),
        None => name.eq_ignore_ascii_case("localhost"),
    };
    if is_known || names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        return Ok(host);
    }
    Err(format!(
        "the console has no host name {}; call it by localhost or by the address of the admin \
         port, or start the node with --console-host and this name",
        quote(name)
    ))
}

/// Checks that a change comes from a page of the console.
///
/// # Errors
/// The header `Origin` is missing or names another origin.
pub(super) fn check_origin(
    headers: &HeaderMap,
    host: &str,
    is_encrypted: bool,
) -> Result<(), String> {
    let scheme = if is_encrypted { "https" } else { "http" };
    let own = format!("{scheme}://{host}");
    let mut origins = headers.get_all(ORIGIN).iter();
    let (origin, other) = (origins.next(), origins.next());
    let origin = origin.filter(|_| other.is_none()).and_then(|origin| origin.to_str().ok());
    match origin {
        Some(origin) if origin.eq_ignore_ascii_case(&own) => Ok(()),
        Some(origin) => Err(format!(
            "a change must come from a page of the console: origin {} is not {own}",
            quote(origin)
        )),
        None => Err("a change must come from a page of the console: it has no origin".to_owned()),
    }
}

/// Returns the addresses by which a browser reaches a listener: the listener's own, unless it
/// listens on all, and the address at which the connection came in.
pub(super) fn addresses(listener: SocketAddr, local: Option<SocketAddr>) -> Vec<IpAddr> {
    let own = Some(listener.ip()).filter(|ip| !ip.is_unspecified());
    own.into_iter().chain(local.map(|local| local.ip().to_canonical())).collect()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // A colon within brackets is a part of an IPv6 address.
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: hyper::header::HeaderName, values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name.clone(), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn only_names_of_the_console_are_accepted() {
        let names = ["console.example".to_owned(), "[2001:db8::7]".to_owned()];
        let listener = "192.0.2.1:9644".parse().unwrap();
        let local = Some("[::ffff:192.0.2.2]:9644".parse().unwrap());
        let addresses = addresses(listener, local);
        let check = |host: &str| check_host(&with(HOST, &[host]), &names, &addresses).is_ok();
        for host in [
            "localhost",
            "LocalHost:9644",
            "127.0.0.1:1",
            "[::1]:9644",
            "192.0.2.1:9644",
            "192.0.2.2",
            "Console.Example:443",
            "[2001:db8::7]:9644",
        ] {
            assert!(check(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "evil.example:9644",
            "192.0.2.3",
            "127.0.0.1.evil.example",
            "localhost:9644@evil.example",
            "[2001:db8::8]",
        ] {
            assert!(!check(host), "{host}");
        }
        assert!(check_host(&HeaderMap::new(), &names, &addresses).is_err());
        let two = with(HOST, &["localhost", "evil.example"]);
        assert!(check_host(&two, &names, &addresses).is_err());
    }

    #[test]
    fn a_listener_on_all_addresses_has_the_one_of_the_connection() {
        let local = Some("192.0.2.2:9644".parse().unwrap());
        let addresses = addresses("0.0.0.0:9644".parse().unwrap(), local);
        let check = |host: &str| check_host(&with(HOST, &[host]), &[], &addresses).is_ok();
        assert!(check("192.0.2.2:9644") && !check("0.0.0.0:9644") && !check("192.0.2.3:9644"));
    }

    #[test]
    fn changes_come_from_the_same_origin() {
        let check = |origins: &[&str], is_encrypted: bool| {
            check_origin(&with(ORIGIN, origins), "localhost:9644", is_encrypted).is_ok()
        };
        assert!(check(&["http://localhost:9644"], false));
        assert!(check(&["https://localhost:9644"], true));
        assert!(!check(&["https://localhost:9644"], false));
        assert!(!check(&["http://localhost:9645"], false));
        assert!(!check(&["null"], false) && !check(&[], false));
        assert!(!check(&["http://evil.example"], false));
        assert!(!check(&["http://localhost:9644", "http://evil.example"], false));
    }
}
