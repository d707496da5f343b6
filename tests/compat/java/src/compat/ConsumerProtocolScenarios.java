package compat;

import java.util.Map;

/**
 * Scenarios of groups with the consumer protocol (KIP-848), in which the coordinator assigns partitions. They repeat
 * scenarios of classic groups. A client without {@code SubscriptionPattern} has only a preview of the protocol, so it
 * does not run them.
 */
final class ConsumerProtocolScenarios {
    private static final String PROTOCOL = MemberOptions.SERVER_SIDE;

    private ConsumerProtocolScenarios() {}

    static void register(Map<String, Body> scenarios) {
        try {
            Class.forName("org.apache.kafka.clients.consumer.SubscriptionPattern");
        } catch (ClassNotFoundException preview) {
            return;
        }
        put(scenarios, "1-2-4", run -> GroupScenarios.oneTwoFour(run, true, PROTOCOL));
        put(scenarios, "leave", run -> GroupScenarios.leave(run, GroupScenarios.SOON_SECONDS, PROTOCOL));
        put(scenarios, "commit-resume", run -> GroupScenarios.commitResume(run, PROTOCOL));
        put(scenarios, "commit-in-revoke", run -> GroupScenarios.commitInRevoke(run, PROTOCOL));
        put(scenarios, "cooperative", run -> CooperativeScenarios.cooperative(run, PROTOCOL));
        put(scenarios, "partition-added", run -> GroupScenarios.partitionAdded(run, PROTOCOL));
        put(scenarios, "topic-deleted", run -> GroupScenarios.topicDeleted(run, PROTOCOL));
        put(scenarios, "regex", run -> GroupScenarios.regex(run, PROTOCOL));
        put(scenarios, "subscription-change", run -> GroupScenarios.subscriptionChange(run, PROTOCOL));
        put(scenarios, "crash", run -> FailureScenarios.crash(run, PROTOCOL));
        put(scenarios, "crash-half-open", run -> FailureScenarios.crashHalfOpen(run, PROTOCOL));
        put(scenarios, "gateway-restart", run -> FailureScenarios.gatewayAway(run, "restart", PROTOCOL));
        put(scenarios, "gateway-kill", run -> FailureScenarios.gatewayAway(run, "kill", PROTOCOL));
    }

    private static void put(Map<String, Body> scenarios, String name, Body body) {
        scenarios.put("consumer-protocol." + name, body);
    }
}
