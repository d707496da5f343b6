{{- define "sluice.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "sluice.labels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The protocol of all listeners. */ -}}
{{- define "sluice.protocol" -}}
{{- .Values.protocol | default (ternary "SSL" "PLAINTEXT" (not (empty .Values.tls.secretName))) -}}
{{- end -}}
