//! Every method with every kind of client certificate gives the documented error.

use helix_proto::error::from_status;
use helix_proto::log::v1::ErrorReason;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Status};

use super::principal::{CheckedServer, names};
use crate::access::calls::{ExampleCall, call, examples};
use crate::access::{TokenInterceptor, WithToken};
use crate::support::reason;

const HOST: &str = "127.0.0.1";

/// Returns a caller without a token whose connections have these files.
fn caller(checked: &CheckedServer, name: &str, ca: &str, host: &'static str) -> WithToken {
    let channel = checked.certificates.channel(name, ca, checked.server.local_addr(), host);
    InterceptedService::new(channel, TokenInterceptor(None))
}

async fn outcome(checked: &CheckedServer, name: &str, example: &ExampleCall) -> Result<(), Status> {
    call(caller(checked, name, "ca", HOST), example).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_refuses_connections_that_are_not_valid() {
    let checked = CheckedServer::start().await;
    let certificates = &checked.certificates;
    certificates.put("stranger", &certificates.ca("other-ca").client("app-1", 30).unwrap());
    certificates.put("late", &certificates.ca("ca").client("app-1", 0).unwrap());
    for example in examples("default") {
        for (name, ca, host, what) in [
            ("stranger", "ca", HOST, "a CA that the node does not trust"),
            ("late", "ca", HOST, "a certificate that has expired"),
            ("client", "other-ca", HOST, "a CA that the client does not trust"),
            ("client", "ca", "n9.example", "another name of the node"),
        ] {
            let method = example.method;
            let refused = call(caller(&checked, name, ca, host), &example).await;
            let Err(status) = refused else { panic!("{method} with {what} was served") };
            // The connection failed, so no handler has responded.
            assert!(from_status(&status).is_none(), "{method} with {what}: {status:?}");
        }
    }
    checked.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_needs_a_certificate_with_its_rights() {
    let checked = CheckedServer::start().await;
    let certificates = &checked.certificates;
    let ambiguous = names(&[], &["a.example.org", "b.example.org"], &["app-1"]);
    let ambiguous = certificates.ca("ca").client_with_names(&ambiguous, 30).unwrap();
    certificates.put("ambiguous", &ambiguous);
    certificates.put("guest", &certificates.ca("ca").client("guest", 30).unwrap());
    for example in examples("default") {
        let method = example.method;
        for (name, why) in [
            ("", "no token was sent, and no client certificate"),
            ("ambiguous", "the client certificate has 2 DNS names"),
        ] {
            let refused = outcome(&checked, name, &example).await.unwrap_err();
            assert_eq!(reason(&refused), ErrorReason::Unauthenticated, "{method}: {refused}");
            assert!(refused.message().contains(why), "{method}: {refused}");
        }
        let is_denied = |outcome: &Result<(), Status>| {
            outcome.as_ref().is_err_and(|status| status.code() == Code::PermissionDenied)
        };
        let needs_rights = !example.needs.rules.is_empty();
        let as_guest = outcome(&checked, "guest", &example).await;
        assert_eq!(is_denied(&as_guest), needs_rights, "{method}: {as_guest:?}");
        if needs_rights {
            checked.admin.allow_access("app-1", &example.needs).await.unwrap();
        }
        let allowed = outcome(&checked, "client", &example).await;
        assert!(!is_denied(&allowed), "{method}: {allowed:?}");
        if needs_rights {
            checked.admin.remove_access("app-1", &example.needs).await.unwrap();
        }
    }
    checked.server.shutdown().await;
}
