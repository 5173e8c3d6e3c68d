{{- define "labels" -}}
{app.kubernetes.io/name: {{ .Chart.Name }}, app.kubernetes.io/instance: {{ .Release.Name | quote }}}
{{- end }}

{{- define "scheme" -}}
{{- if .Values.tlsSecret }}, scheme: HTTPS{{ end }}
{{- end }}
