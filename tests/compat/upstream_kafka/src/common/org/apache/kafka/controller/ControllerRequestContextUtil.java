package org.apache.kafka.controller;

import java.util.OptionalLong;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.security.auth.KafkaPrincipal;

/**
 * In the place of Kafka's class of this name, which is in a jar that nobody publishes: with it Apache Kafka's own
 * clusters answer which ids their topics have.
 */
public final class ControllerRequestContextUtil {
    public static final ControllerRequestContext ANONYMOUS_CONTEXT =
            new ControllerRequestContext(new RequestHeaderData(), KafkaPrincipal.ANONYMOUS, OptionalLong.empty());

    private ControllerRequestContextUtil() {}
}
