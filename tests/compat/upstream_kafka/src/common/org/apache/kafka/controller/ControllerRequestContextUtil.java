package org.apache.kafka.controller;

import java.util.OptionalLong;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.security.auth.KafkaPrincipal;

/**
 * Replaces Kafka's class of this name, which is in a jar that Kafka does not publish. Tests that run against Apache
 * Kafka need this class to ask a controller for the ids of its topics.
 */
public final class ControllerRequestContextUtil {
    public static final ControllerRequestContext ANONYMOUS_CONTEXT =
            new ControllerRequestContext(new RequestHeaderData(), KafkaPrincipal.ANONYMOUS, OptionalLong.empty());

    private ControllerRequestContextUtil() {}
}
